use std::fmt::Write;

use serde_json::{Map, Value};

/// The longest text that a table's cell holds, in characters.
const CELL: usize = 60;

/// One JSON object's leaves as Markdown tables: `a.b | value` for the plain ones, and a table of its own for each list
/// of objects.
pub(crate) fn tables(object: &Map<String, Value>) -> String {
    let (mut plain, mut lists) = (Vec::new(), Vec::new());
    for (name, value) in object {
        split(name.clone(), value, &mut plain, &mut lists);
    }
    let mut page = String::new();
    if !plain.is_empty() {
        page.push_str("| figure | value |\n| --- | --- |\n");
        for (name, value) in plain {
            // Writing to a string can't fail.
            let _ = writeln!(page, "| {name} | {value} |");
        }
    }
    for (name, rows) in lists {
        let _ = writeln!(page, "\n`{name}`:\n\n{}", table(rows));
    }
    page
}

fn split<'a>(
    name: String,
    value: &'a Value,
    plain: &mut Vec<(String, String)>,
    lists: &mut Vec<(String, &'a [Value])>,
) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                split(format!("{name}.{field}"), value, plain, lists);
            }
        }
        Value::Array(rows) if !rows.is_empty() && rows.iter().all(Value::is_object) => {
            lists.push((name, rows))
        }
        leaf => plain.push((name, cell(leaf))),
    }
}

/// A list of objects as one table, its columns those of all its rows.
fn table(rows: &[Value]) -> String {
    let flat: Vec<Vec<(String, String)>> = rows
        .iter()
        .map(|row| {
            let (mut plain, mut lists) = (Vec::new(), Vec::new());
            for (name, value) in row.as_object().into_iter().flatten() {
                split(name.clone(), value, &mut plain, &mut lists);
            }
            // A list within a row is left to the raw answer, and what a row lacks is an empty cell.
            plain.retain(|(_, value)| value != "null");
            plain
        })
        .collect();
    let mut columns: Vec<&str> = Vec::new();
    for (name, _) in flat.iter().flatten() {
        if !columns.contains(&name.as_str()) {
            columns.push(name);
        }
    }
    let mut page = format!("| {} |\n|{}\n", columns.join(" | "), " --- |".repeat(columns.len()));
    for row in &flat {
        let value = |column: &&str| {
            row.iter().find(|(name, _)| name == column).map_or("", |(_, value)| value.as_str()).to_owned()
        };
        let _ = writeln!(page, "| {} |", columns.iter().map(value).collect::<Vec<_>>().join(" | "));
    }
    page
}

fn cell(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.replace('\n', " ").replace('|', "\\|"),
        other => other.to_string(),
    };
    if text.chars().count() <= CELL {
        return text;
    }
    text.chars().take(CELL - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(value: Value) -> String {
        tables(value.as_object().expect("the fixture is an object"))
    }

    #[test]
    fn nested_figures_are_named_by_their_path() {
        let page = of(json!({"steps": {"submitted": 7, "failed": 0}, "rejoined": true}));
        assert!(page.contains("| steps.submitted | 7 |\n"), "{page}");
        assert!(page.contains("| rejoined | true |\n"), "{page}");
    }

    #[test]
    fn a_list_of_objects_is_a_table_with_every_column_that_a_row_has() {
        let page = of(
            json!({"rows": [{"bytes": 64, "us": {"p50": 1.5}}, {"bytes": 128, "us": null, "wait": "spin"}]}),
        );
        assert!(page.contains("| bytes | us.p50 | wait |\n| --- | --- | --- |\n"), "{page}");
        assert!(page.contains("| 64 | 1.5 |  |\n| 128 |  | spin |\n"), "{page}");
    }

    #[test]
    fn text_never_breaks_a_table() {
        let page = of(json!({"text": format!("a|b\n{}", "x".repeat(100))}));
        assert_eq!(page.lines().count(), 3, "{page}");
        assert!(page.contains("a\\|b xxx") && page.contains("x… |"), "{page}");
    }
}
