use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use connex::{Address, Incarnation, LogicalId};

/// Keeps the work of distributed LLM serving correct while the processes behind it join, leave, fail, hang and move.
#[derive(Debug, Parser)]
#[command(name = "connex", version)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Generate text through a pipeline of processes, kill one in mid-generation, and show that nothing was lost
    Demo(DemoArgs),
    /// Bring up a whole deployment on this machine and read prompts from standard input
    Up(UpArgs),
    /// Run the directory
    Directory(DirectoryArgs),
    /// Run one pipeline stage
    Stage(StageArgs),
    /// Get a model
    Model(ModelArgs),
    /// Move an identity to a new process, without losing a step
    Migrate(MigrateArgs),
    /// Kill processes of a deployment at random under load, and count what went wrong
    Chaos(ChaosArgs),
    /// Measure
    Bench(BenchArgs),
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct DemoArgs {
    /// A GGUF file, `auto` (the cached or fetched SmolLM2, else the toy), or `toy`
    #[arg(long, default_value = "auto")]
    pub(crate) model: String,
    /// Pipeline stages
    #[arg(long, default_value_t = 2)]
    pub(crate) stages: u16,
    /// Replicas of each stage
    #[arg(long, default_value_t = 2)]
    pub(crate) replicas: u32,
    /// Output tokens of each request
    #[arg(long, default_value_t = 32)]
    pub(crate) tokens: u32,
    /// Replaces the first of the four prompts
    #[arg(long)]
    pub(crate) prompt: Option<String>,
    /// What to kill: `stage=S,replica=R`, or `none`
    #[arg(long, default_value = "stage=1,replica=0")]
    pub(crate) kill: Kill,
    /// Print one JSON object on standard output, and progress on standard error
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which process to kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kill {
    None,
    At { stage: u16, replica: u32 },
}

impl std::str::FromStr for Kill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Kill::None);
        }
        let bad = || format!("{text:?}: write stage=S,replica=R, or none");
        let (stage, replica) = text.split_once(',').ok_or_else(bad)?;
        Ok(Kill::At {
            stage: stage.strip_prefix("stage=").and_then(|n| n.parse().ok()).ok_or_else(bad)?,
            replica: replica.strip_prefix("replica=").and_then(|n| n.parse().ok()).ok_or_else(bad)?,
        })
    }
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct UpArgs {
    /// A GGUF file, `auto` or `toy`
    #[arg(long, default_value = "auto")]
    pub(crate) model: String,
    /// Pipeline stages
    #[arg(long, default_value_t = 2)]
    pub(crate) stages: u16,
    /// Replicas of each stage
    #[arg(long, default_value_t = 2)]
    pub(crate) replicas: u32,
    /// Output tokens of each request
    #[arg(long, default_value_t = 64)]
    pub(crate) tokens: u32,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct DirectoryArgs {
    /// Where to listen, as host:port
    #[arg(long, default_value = "127.0.0.1:4100")]
    pub(crate) listen: String,
    /// Keep the boot number here, so that it grows even if the wall clock steps back
    #[arg(long)]
    pub(crate) state: Option<PathBuf>,
    /// This is the first directory of its deployment: there are no holders of before to wait for
    #[arg(long)]
    pub(crate) first: bool,
    /// How long an identity is held unless renewed, in milliseconds
    #[arg(long, default_value_t = 2000)]
    pub(crate) lease_ttl_ms: u64,
    /// The deployment's name
    #[arg(long, default_value = "default")]
    pub(crate) deployment: String,
    /// End when the process with this id does
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct StageArgs {
    /// The identity to serve: model/role/stage/replica/shard
    #[arg(long, value_parser = parse_lid)]
    pub(crate) lid: LogicalId,
    /// How many stages the pipeline has
    #[arg(long)]
    pub(crate) stages: u16,
    /// The layers of this stage, as A..B; by default its even share
    #[arg(long)]
    pub(crate) layers: Option<Layers>,
    /// A GGUF file, or `toy`
    #[arg(long, default_value = "toy")]
    pub(crate) model: String,
    /// The directory, as host:port
    #[arg(long, value_parser = parse_address, default_value = "127.0.0.1:4100")]
    pub(crate) directory: Address,
    /// Where to listen, as host:port; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    pub(crate) listen: String,
    /// The host that peers are told, if it is not the one listened on
    #[arg(long)]
    pub(crate) advertise: Option<String>,
    /// The deployment's name
    #[arg(long, default_value = "default")]
    pub(crate) deployment: String,
    /// Take the identity over from the process that serves it
    #[arg(long)]
    pub(crate) migrate: bool,
    /// Steps that stage 0 keeps in flight
    #[arg(short, long, default_value_t = 4)]
    pub(crate) k: usize,
    /// How long each step of the toy takes, in microseconds
    #[arg(long, default_value_t = 0)]
    pub(crate) toy_step_us: u64,
    /// Record each execution here
    #[arg(long, hide = true)]
    pub(crate) ledger: Option<PathBuf>,
    /// Put in a bug on purpose
    #[arg(long, hide = true)]
    pub(crate) plant: Option<Plant>,
    /// The life whose word on this process's exit is taken
    #[arg(long, hide = true, value_parser = parse_incarnation)]
    pub(crate) guardian: Option<Incarnation>,
    /// End when the process with this id does
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
}

/// A range of layers, A..B.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layers(pub(crate) std::ops::Range<u32>);

impl std::str::FromStr for Layers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?}: write A..B, with A below B");
        let (start, end) = text.split_once("..").ok_or_else(bad)?;
        let range = start.parse().map_err(|_| bad())?..end.parse().map_err(|_| bad())?;
        if range.start < range.end { Ok(Layers(range)) } else { Err(bad()) }
    }
}

/// A bug that a harness must notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Plant {
    /// Steps are applied twice now and then
    Rerun,
    /// State is lost now and then, without a word
    LostState,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct ModelArgs {
    #[command(subcommand)]
    pub(crate) verb: ModelVerb,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ModelVerb {
    /// Fetch SmolLM2-135M-Instruct into the cache directory and check it
    Fetch,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct MigrateArgs {
    /// The identity to move
    #[arg(value_parser = parse_lid)]
    pub(crate) lid: LogicalId,
    /// The directory, as host:port
    #[arg(long, value_parser = parse_address, default_value = "127.0.0.1:4100")]
    pub(crate) directory: Address,
    /// A GGUF file, or `toy`
    #[arg(long, default_value = "toy")]
    pub(crate) model: String,
    /// How many stages the pipeline has
    #[arg(long)]
    pub(crate) stages: u16,
    /// Where the new process listens
    #[arg(long, default_value = "127.0.0.1:0")]
    pub(crate) listen: String,
    /// The deployment's name
    #[arg(long, default_value = "default")]
    pub(crate) deployment: String,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct ChaosArgs {
    /// How many processes to kill
    #[arg(long, default_value_t = 100)]
    pub(crate) kills: u32,
    /// Draws the victims and the prompts
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,
    /// Pipeline stages
    #[arg(long, default_value_t = 2)]
    pub(crate) stages: u16,
    /// Replicas of each stage
    #[arg(long, default_value_t = 3)]
    pub(crate) replicas: u32,
    /// Clients that each keep one request going
    #[arg(long, default_value_t = 8)]
    pub(crate) clients: u32,
    /// Put a bug in on purpose, which must be noticed
    #[arg(long)]
    pub(crate) plant: Option<Plant>,
    /// Print one JSON object on standard output, and progress on standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) verb: BenchVerb,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum BenchVerb {
    /// A step against the same connection without actors, and against a plain echo
    Step(BenchStepArgs),
    /// From the kill of a process to the re-sending of its last step
    Handover(BenchHandoverArgs),
    /// An identity moved under load
    Migrate(BenchMigrateArgs),
    /// Idle endpoints: their memory and the time to start them
    Endpoints(BenchEndpointsArgs),
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct BenchStepArgs {
    /// The transport
    #[arg(long, default_value = "tcp")]
    pub(crate) transport: String,
    /// Payload sizes, such as 64B,16KiB,1MiB
    #[arg(long, default_value = "64B,16KiB,1MiB", value_delimiter = ',', value_parser = parse_size)]
    pub(crate) sizes: Vec<usize>,
    /// Steps in flight
    #[arg(long, default_value = "1,8,32", value_delimiter = ',')]
    pub(crate) inflight: Vec<usize>,
    /// Repetitions of each row, interleaved
    #[arg(long, default_value_t = 5)]
    pub(crate) rounds: usize,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// Be the serving process of the benchmark
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
    /// End when the process with this id does
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct BenchHandoverArgs {
    /// How many kills
    #[arg(long, default_value_t = 300)]
    pub(crate) runs: u32,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct BenchMigrateArgs {
    /// How many migrations
    #[arg(long, default_value_t = 200)]
    pub(crate) runs: u32,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct BenchEndpointsArgs {
    /// How many endpoints
    #[arg(long, default_value_t = 10_000)]
    pub(crate) count: u32,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_lid(text: &str) -> Result<LogicalId, String> {
    text.parse().map_err(|error: connex::protocol::IdError| error.to_string())
}

fn parse_incarnation(text: &str) -> Result<Incarnation, String> {
    u64::from_str_radix(text, 16).map(Incarnation::from_bits).map_err(|error| error.to_string())
}

/// `host:port`, with or without `tcp://`.
fn parse_address(text: &str) -> Result<Address, String> {
    let address =
        Address::new(if text.contains("://") { text.to_owned() } else { format!("tcp://{text}") }.as_str());
    match address.split() {
        ("tcp", rest) if rest.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) => {
            Ok(address)
        }
        _ => Err(format!("{text:?}: write host:port, such as 127.0.0.1:4100 or [::1]:4100")),
    }
}

fn parse_size(text: &str) -> Result<usize, String> {
    let units = [("GiB", 1usize << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
    let bad = || format!("{text:?}: write a size such as 64B, 16KiB or 1MiB");
    let (number, unit) =
        units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit))).ok_or_else(bad)?;
    number.trim().parse::<usize>().ok().and_then(|number| number.checked_mul(unit)).ok_or_else(bad)
}
