//! F39: whatever arrives on a live node's port ends its own session. The node serves on, and its memory stays.

use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use connex::protocol::wire::LENGTH_PREFIX;
use connex::protocol::wire::hello::Lane;
use connex::{Address, NodeEvent};

use crate::raw::{Raw, assert_ended, connect, hello_of, stranger};
use crate::world::{Load, client, directory, echo, listen, replica, resident};

const LYING: [u8; 8] = (1u64 << 63 | u32::MAX as u64).to_le_bytes();

/// A frame of 17 MiB: one more than the largest.
fn oversized() -> Vec<u8> {
    let mut frame = (17u32 << 20).to_le_bytes().to_vec();
    frame.resize(frame.len() + (256 << 10), 7);
    frame
}

/// Sends bytes, and waits until the node has ended the connection. `hang_up` says that nothing more comes.
fn ends(stream: &mut TcpStream, what: &str, bytes: &[u8], hang_up: bool) {
    // The node may end it before all is written.
    let _ = stream.write_all(bytes);
    if hang_up {
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
    assert_ended(stream, what);
}

/// Every case but the slow one, by strangers and on links that are up.
fn every_case(at: &Address) {
    let hello = hello_of(stranger(), Lane::Control);
    let garbage: Vec<u8> = (0..5000u32).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let whole: &[u8] = &hello;
    for (what, bytes, hang_up) in [
        ("a length of 2^63", &LYING[..], false),
        ("a frame of 17 MiB", &oversized(), false),
        ("a truncated hello", &whole[..whole.len() - 3], true),
        ("garbage", &garbage, false),
        ("an HTTP request", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", false),
    ] {
        ends(&mut connect(at), what, bytes, hang_up);
        for lane in [Lane::Control, Lane::Bulk] {
            let mut raw = Raw::dial(at);
            // After the hello a frame of this lane begins: a header, and then what it announced.
            let bytes = if what.starts_with("a truncated") { &whole[..LENGTH_PREFIX + 20] } else { bytes };
            let (stream, other) = match lane {
                Lane::Control => (&mut raw.control, &mut raw.bulk),
                Lane::Bulk => (&mut raw.bulk, &mut raw.control),
            };
            ends(stream, what, bytes, hang_up);
            assert_ended(other, what);
        }
    }
}

/// A header that arrives one byte a second.
fn one_byte_a_second(at: &Address) {
    let hello = hello_of(stranger(), Lane::Control);
    let mut stranger = connect(at);
    let mut peer = Raw::dial(at);
    for byte in hello.iter().take(12) {
        // Whichever was ended takes no more.
        let _ = stranger.write_all(&[*byte]);
        let _ = peer.control.write_all(&[*byte]);
        // This is the fault itself, not a wait for anything.
        thread::sleep(Duration::from_secs(1));
    }
    assert_ended(&mut stranger, "a hello of one byte a second");
    assert_ended(&mut peer.control, "a frame of one byte a second");
    assert_ended(&mut peer.bulk, "the other lane of it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f39_whatever_arrives_on_the_port_of_a_live_node_its_steps_go_on_and_its_memory_stays() {
    let directory = directory(listen("127.0.0.1:0")).await;
    let replica = replica(&directory.address(), 0, listen("127.0.0.1:0"), echo()).await;
    let client = client(&directory.address(), listen("127.0.0.1:0")).await;
    let before = directory.routes();
    let load = Load::start(&client);
    load.goes_on().await;
    let mut events = client.events();
    let ports = [replica.address(), directory.address(), client.address()];
    let slow: Vec<_> = ports
        .iter()
        .cloned()
        .map(|port| tokio::task::spawn_blocking(move || one_byte_a_second(&port)))
        .collect();
    let mut flat = 0;
    for round in 0..12 {
        for port in ports.clone() {
            tokio::task::spawn_blocking(move || every_case(&port)).await.unwrap();
            load.goes_on().await;
        }
        if round == 3 {
            flat = resident();
        }
    }
    for slow in slow {
        slow.await.unwrap();
    }
    load.goes_on().await;
    let grown = resident().saturating_sub(flat);
    println!("grown by {} KiB", grown >> 10);
    assert!(grown < 24 << 20, "{grown} bytes more are resident");
    assert_eq!(directory.routes(), before, "the lease went on");
    let lost = std::iter::from_fn(|| events.try_recv().ok())
        .find(|event| matches!(event, NodeEvent::Down { .. } | NodeEvent::DirectoryAway));
    assert!(lost.is_none(), "{lost:?}");
}
