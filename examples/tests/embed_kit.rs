//! A test of one's own engine with the test kit: the death of a replica costs no call.

use connex::testkit::Cluster;
use connex::{Bytes, Group, NodeEvent, Step, serve_fn};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn my_engine_survives_the_death_of_a_replica() {
    let mut cluster = Cluster::start().await;
    let group = Group::new("my-model", "reverse", 0);
    for replica in 0..2 {
        let engine = serve_fn(|step| Ok(step.payload().iter().rev().copied().collect::<Bytes>()));
        cluster.serve(group.replica(replica), engine).await;
    }
    let handle = cluster.client().group(&group);
    cluster.kill(&group.replica(0)).await;
    cluster.expect(|event| matches!(event, NodeEvent::Down { .. })).await;
    let reply = handle.call(Step::new("").payload("stressed").route(vec![0])).await.unwrap();
    assert_eq!(reply.body, "desserts");
    assert_eq!(reply.route, [1]);
}
