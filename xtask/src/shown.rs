/// A command that shows one of the project's promises, by its exit code and its figures.
pub(crate) struct Shown {
    /// What follows `connex`.
    pub(crate) args: &'static str,
    /// What its success means.
    pub(crate) shows: &'static str,
}

/// What the README promises, as commands that anyone can run. A new promise is a new row.
pub(crate) const SHOWN: [Shown; 8] = [
    Shown {
        args: "demo --json",
        shows: "a stage is killed in mid-generation, and every text equals that of an undisturbed run",
    },
    Shown {
        args: "chaos --kills 100 --seed 7 --json",
        shows: "a hundred kills under load: nothing is lost, done twice or wrong",
    },
    Shown {
        args: "chaos --kills 5 --seed 7 --plant rerun --json",
        shows: "a planted double execution is noticed",
    },
    Shown {
        args: "chaos --kills 5 --seed 7 --plant lost-state --json",
        shows: "a planted loss of state is noticed",
    },
    Shown {
        args: "bench migrate --runs 200 --json",
        shows: "identities move under load: nothing fails, is done twice or out of order",
    },
    Shown {
        args: "bench handover --runs 300 --json",
        shows: "from just before the kill until the successor's transport has the last step that was sent again",
    },
    Shown {
        args: "bench step --transport tcp --sizes 64B,16KiB,1MiB --inflight 1,8,32 --json",
        shows: "a step beside the same connection without actors, and beside a plain echo",
    },
    Shown { args: "bench endpoints --count 10000 --json", shows: "what an idle endpoint costs" },
];
