//! `connex up`: a whole deployment, kept up, with prompts from standard input.

use connex::engine::Text;
use connex::pipeline::{self, RequestMeta};
use connex::{GroupHandle, Step};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::args::UpArgs;
use crate::child::asked_to_end;
use crate::deployment::{Deployment, News, Plan, What};
use crate::model::Model;
use crate::report::{Line, say};

pub(crate) async fn run(args: UpArgs) -> anyhow::Result<bool> {
    let model = Model::resolve(&args.model)?;
    let text = model.text()?;
    let deployment = Deployment::start(Plan::new(model, args.stages, args.replicas)).await?;
    say!("the directory serves at {}", deployment.directory());
    for seat in deployment.seats() {
        for life in deployment.lives(seat) {
            say!("{} is process {}", life.lid, life.pid);
        }
    }
    let group = deployment.client().group(&deployment.group()?);
    group.ready().await;
    say!("ready: write a prompt and press Enter; end with Ctrl-D");
    let mut news = deployment.news();
    tokio::select! {
        ended = answer_all(&group, &*text, args.tokens) => ended?,
        () = narrate(&mut news) => {}
        () = asked_to_end() => {}
    }
    deployment.stop().await;
    Ok(true)
}

/// Answers prompts until standard input ends. A prompt that can't be answered is told why, and the next one is read.
async fn answer_all(group: &GroupHandle, text: &dyn Text, tokens: u32) -> anyhow::Result<()> {
    let mut prompts = BufReader::new(tokio::io::stdin()).lines();
    while let Some(prompt) = prompts.next_line().await? {
        if !prompt.trim().is_empty()
            && let Err(error) = answer(group, text, &prompt, tokens).await
        {
            say!("the request ended: {error:#}");
        }
    }
    Ok(())
}

/// Tells what is heard of the stages, until there is nobody left to be heard.
async fn narrate(news: &mut broadcast::Receiver<News>) {
    loop {
        match news.recv().await {
            Ok(News { what, .. }) => match what {
                What::Line(Line::Told { text }) => say!("{text}"),
                What::Line(line @ Line::HandedOver { .. }) => say!("{line:?}"),
                What::Exited(how) => say!("a stage ended ({how}); it is started again"),
                What::Line(_) => {}
            },
            Err(RecvError::Lagged(missed)) => say!("{missed} events came too fast to be shown"),
            Err(RecvError::Closed) => return,
        }
    }
}

/// Streams one answer to standard output.
async fn answer(group: &GroupHandle, text: &dyn Text, prompt: &str, tokens: u32) -> anyhow::Result<()> {
    let prompt = text.encode(prompt)?;
    let step =
        Step::new(RequestMeta { max_tokens: tokens }.encode()).payload(pipeline::encode_tokens(&prompt));
    let mut stream = group.stream(step).await?;
    let mut out = tokio::io::stdout();
    let (mut all, mut shown) = (Vec::new(), 0);
    while let Some(item) = stream.next().await {
        all.extend(pipeline::decode_tokens(&item).unwrap_or_default());
        let whole = text.decode(&all);
        if let Some(new) = whole.get(shown..) {
            out.write_all(new.as_bytes()).await?;
            out.flush().await?;
            shown = whole.len();
        }
    }
    out.write_all(b"\n").await?;
    out.flush().await?;
    stream.end().await?;
    Ok(())
}
