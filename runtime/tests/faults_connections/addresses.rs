//! F44: every form of address works for a whole deployment, or an error names the address. Nothing hangs.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use connex::transport::tcp::TcpConfig;
use connex::{Address, ErrorCode, Node, NodeEvent, Step};

use crate::world::{SLACK, client, directory, echo, expect, group, listen, replica, within};

fn no_ipv6() -> bool {
    let none = TcpListener::bind("[::1]:0").is_err();
    if none {
        println!("skipped: this machine has no IPv6 loopback address");
    }
    none
}

fn port(address: &Address) -> String {
    address.as_str().rsplit_once(':').unwrap().1.to_owned()
}

async fn answers(client: &Node) {
    let reply = within(client.group(&group()).call(Step::new("").payload("hello"))).await.unwrap();
    assert_eq!(reply.body, "hello");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f44_a_deployment_on_ipv6_loopback_works_and_so_does_every_spelling_of_its_address() {
    if no_ipv6() {
        return;
    }
    let directory = directory(listen("[::1]:0")).await;
    let replica = replica(&directory.address(), 0, listen("[::1]:0"), echo()).await;
    let told = directory.routes()[0].address.clone();
    assert_eq!(told, replica.address());
    assert!(told.as_str().starts_with("tcp://[::1]:"), "{told}");
    for host in ["[::1]", "[0000:0000:0000:0000:0000:0000:0000:0001]", "[0:0:0:0:0:0:0:1]", "[::1%0]"] {
        let named = Address::new(&format!("tcp://{host}:{}", port(&directory.address())));
        let client = client(&named, listen("[0000:0000:0000:0000:0000:0000:0000:0001]:0")).await;
        answers(&client).await;
        client.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f44_clients_of_either_family_use_a_deployment_that_listens_on_both() {
    if no_ipv6() {
        return;
    }
    let both = |advertise: &str| TcpConfig {
        trusted_network: true,
        advertise: Some(advertise.into()),
        ..listen("[::]:0")
    };
    // A name stands for addresses of both families: whoever has only one of them finds its own.
    for advertise in ["127.0.0.1", "localhost"] {
        let directory = directory(both(advertise)).await;
        let replica = replica(&directory.address(), 0, both(advertise), echo()).await;
        assert!(replica.address().as_str().starts_with(&format!("tcp://{advertise}:")));
        for (own, host) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "[::1]")] {
            let named = Address::new(&format!("tcp://{host}:{}", port(&directory.address())));
            let client = client(&named, listen(own)).await;
            answers(&client).await;
            client.shutdown().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f44_an_address_that_leads_nowhere_is_named_and_nothing_hangs() {
    let directory = directory(listen("127.0.0.1:0")).await;
    // A link-local address without its scope, an interface that is not there, a name that is none.
    for (number, host) in [(0, "[fe80::1]"), (1, "[fe80::1%no-such]"), (2, "no-such-host.invalid")] {
        let config = TcpConfig { advertise: Some(format!("{host}:9")), ..listen("127.0.0.1:0") };
        let replica = replica(&directory.address(), number, config, echo()).await;
        let client = client(&directory.address(), listen("127.0.0.1:0")).await;
        let mut events = client.events();
        let began = Instant::now();
        let step = Step::new("").deadline(Duration::from_millis(200));
        let error = within(client.group(&group()).call(step)).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::DeadlineExceeded);
        let event = expect(&mut events, |event| matches!(event, NodeEvent::Unreachable { .. })).await;
        let NodeEvent::Unreachable { peer, why } = event else { unreachable!("it was just matched") };
        assert_eq!(&peer, replica.me());
        assert!(why.contains(&format!("tcp://{host}:9")), "{why}");
        assert!(began.elapsed() < SLACK);
        replica.drain(Duration::from_secs(1)).await;
    }
}

/// Runs a test of this file again inside a network namespace of its own, once `setup` has been done there. True inside;
/// outside it returns false when all that is over, or can't be had here.
fn inside_a_namespace(test: &str, setup: &str) -> bool {
    const INSIDE: &str = "CONNEX_TEST_INSIDE";
    const NO_SETUP: i32 = 77;
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let can = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    if !can("ip", &["-V"]) {
        println!("skipped: ip is not installed (Debian: iproute2)");
    } else if !can("unshare", &["-n", "true"]) {
        println!("skipped: a network namespace takes root, or unshare is not installed");
    } else {
        let script = format!("{{ {setup}; }} || exit {NO_SETUP}; exec \"$0\" --exact {test} --nocapture");
        let mut command = Command::new("unshare");
        command.args(["-n", "sh", "-ec", &script]).arg(std::env::current_exe().unwrap()).env(INSIDE, "1");
        let status = command.status().unwrap();
        match status.code() {
            Some(NO_SETUP) => println!("skipped: {setup} failed in a namespace"),
            _ => assert!(status.success(), "{test} failed in its namespace: {status}"),
        }
    }
    false
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f44_a_link_local_address_works_with_its_scope_by_number_and_by_name() {
    let name = "addresses::f44_a_link_local_address_works_with_its_scope_by_number_and_by_name";
    let setup = "ip link set lo up && ip link add v0 type veth peer name v1 && ip link set v0 up && \
                 ip link set v1 up && ip addr add fe80::77/64 dev v0 nodad";
    if !inside_a_namespace(name, setup) {
        return;
    }
    let on = |host: &str| TcpConfig { trusted_network: true, ..listen(&format!("[{host}]:0")) };
    let directory = directory(on("fe80::77%v0")).await;
    let replica = replica(&directory.address(), 0, on("fe80::77%v0"), echo()).await;
    // Peers are told the scope as well: without it the address leads nowhere.
    let told = replica.address();
    let scope = told.as_str().strip_prefix("tcp://[fe80::77%").unwrap().split(']').next().unwrap().to_owned();
    for host in ["fe80::77%v0".to_owned(), format!("fe80::77%{scope}")] {
        let named = Address::new(&format!("tcp://[{host}]:{}", port(&directory.address())));
        let client = client(&named, on(&host)).await;
        answers(&client).await;
        client.shutdown().await;
    }
    println!("a link-local address works with its scope");
}
