//! Peers of another version of the protocol: both sides say so, and nothing else is disturbed.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use connex::protocol::wire::directory::{Change, Route};
use connex::protocol::wire::hello::{Lane, Opening, Reject};
use connex::protocol::wire::{LENGTH_PREFIX, VERSION};
use connex::{Address, Epoch, NodeEvent};

use crate::raw::{assert_ended, connect, hello_of, read_opening, stranger};
use crate::world::{Load, client, directory, echo, expect, lid, listen, replica};

/// The opening of a peer of another version, which this build can't know any further.
fn other_version(lane: Lane) -> Vec<u8> {
    let mut hello = hello_of(stranger(), lane);
    hello[LENGTH_PREFIX + 4..LENGTH_PREFIX + 6].copy_from_slice(&99u16.to_le_bytes());
    hello
}

/// Answers everybody who connects with a hello of another version.
fn serve_another_version() -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::new(&format!("tcp://{}", listener.local_addr().unwrap()));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(&other_version(Lane::Control));
                // It stays until the other side has read the answer and gone.
                while matches!(stream.read(&mut [0; 4096]), Ok(1..)) {}
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_of_another_version_is_told_which_this_is_and_the_node_says_so_too() {
    let directory = directory(listen("127.0.0.1:0")).await;
    let replica = replica(&directory.address(), 0, listen("127.0.0.1:0"), echo()).await;
    let client = client(&directory.address(), listen("127.0.0.1:0")).await;
    let load = Load::start(&client);
    let mut events = replica.events();
    for port in [replica.address(), directory.address()] {
        let refused = tokio::task::spawn_blocking(move || {
            let mut stream = connect(&port);
            stream.write_all(&other_version(Lane::Control)).unwrap();
            let answer = read_opening(&mut stream);
            assert_ended(&mut stream, "a peer of another version");
            answer
        });
        // The answer carries the node's own version, and a peer of another one reads no more of it than that.
        match refused.await.unwrap() {
            Opening::Reject(Reject::Version { theirs, .. }) => assert_eq!(theirs, VERSION),
            other => panic!("{other:?}"),
        }
        load.goes_on().await;
    }
    let refused = expect(&mut events, |event| matches!(event, NodeEvent::CallerRefused { .. })).await;
    let NodeEvent::CallerRefused { why, .. } = refused else { unreachable!("it was just matched") };
    assert!(why.contains("version 99") && why.contains(&format!("version {VERSION}")), "{why}");
    assert_eq!(directory.routes().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_of_another_version_is_named_to_its_submitters_and_the_other_serves_every_step() {
    let directory = directory(listen("127.0.0.1:0")).await;
    let _replica = replica(&directory.address(), 0, listen("127.0.0.1:0"), echo()).await;
    let client = client(&directory.address(), listen("127.0.0.1:0")).await;
    let load = Load::start(&client);
    load.goes_on().await;
    let mut events = client.events();
    // A directory that names a process of another release: a rolling upgrade gone wrong.
    let address = serve_another_version();
    let (incarnation, epoch) = (stranger(), Epoch { boot: 1, counter: 1 });
    let (ready, draining, shadow) = (true, false, None);
    let route = Route { lid: lid(1), incarnation, address: address.clone(), epoch, ready, draining, shadow };
    client.core().on_change(Change::Put(route));
    let event = expect(&mut events, |event| matches!(event, NodeEvent::Unreachable { .. })).await;
    let NodeEvent::Unreachable { peer, why } = event else { unreachable!("it was just matched") };
    assert_eq!((peer.lid, peer.incarnation), (lid(1), incarnation));
    assert!(why.contains("version 99") && why.contains(&format!("version {VERSION}")), "{why}");
    assert!(why.contains(address.as_str()) && why.contains("same release"), "{why}");
    load.goes_on().await;
    load.goes_on().await;
    // It is tried again and again, and said once.
    let again = std::iter::from_fn(|| events.try_recv().ok());
    assert_eq!(again.filter(|event| matches!(event, NodeEvent::Unreachable { .. })).count(), 0);
}
