//! `connex directory`.

use std::time::Duration;

use anyhow::Context;
use connex::Reach;
use connex::directory::{Directory, DirectoryConfig};
use connex::protocol::directory::RegistryConfig;
use connex::transport::tcp::TcpConfig;

use crate::args::DirectoryArgs;
use crate::child::{asked_to_end, die_with_parent, listen_to_parent};
use crate::report::{Line, say, tell};

pub(crate) async fn run(args: DirectoryArgs) -> anyhow::Result<bool> {
    die_with_parent(args.parent);
    listen_to_parent(args.parent, |_| {});
    // A state file that is not there yet means that there was no directory before.
    let first = args.first || args.state.as_ref().is_some_and(|path| !path.exists());
    let directory = Directory::start(DirectoryConfig {
        reach: Reach::Tcp(TcpConfig { listen: args.listen.clone(), ..TcpConfig::default() }),
        deployment: args.deployment,
        registry: RegistryConfig {
            ttl: Duration::from_millis(args.lease_ttl_ms),
            first,
            ..RegistryConfig::default()
        },
        state_file: args.state,
    })
    .await
    .with_context(|| format!("the directory can't be started on {}", args.listen))?;
    let address = directory.address();
    if args.parent.is_some() {
        tell(&Line::Ready {
            lid: "connex/directory/0/0/0".into(),
            incarnation: String::new(),
            address: address.to_string(),
            pid: std::process::id(),
        });
    } else {
        say!("the directory serves at {address}");
    }
    asked_to_end().await;
    directory.shutdown().await;
    Ok(true)
}
