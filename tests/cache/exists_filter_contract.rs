//! The exists filter contract on the memory backend, with a paused clock, and on real Redis servers.

mod memory {
    tollgate::exists_filter_contract!(
        #[tokio::test(start_paused = true)]
        async {
            tollgate::MemoryBackend::new()
        }
    );
}

mod redis_server {
    use crate::support::server::RedisServer;
    use crate::support::shared::patient;

    tollgate::exists_filter_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let server = RedisServer::start();
            claim(patient(server.url()).await).await;
            server.every_key_expires();
        }
    );
}

mod cluster {
    use crate::support::cluster::Cluster;
    use crate::support::shared::{Shared, connect};

    static CLUSTER: Shared<Cluster> = Shared::new();

    tollgate::exists_filter_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let cluster = CLUSTER.get(Cluster::start);
            claim(connect(&cluster.url()).await).await;
        }
    );
}
