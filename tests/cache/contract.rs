//! The cache contract on the memory backend, with a paused clock, and on real Redis servers.

mod memory {
    tollgate::cache_contract!(
        #[tokio::test(start_paused = true)]
        async {
            tollgate::MemoryBackend::new()
        }
    );
}

mod redis_server {
    use crate::support::server::RedisServer;
    use crate::support::shared::patient;

    tollgate::cache_contract!(
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

    tollgate::cache_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let cluster = CLUSTER.get(Cluster::start);
            claim(connect(&cluster.url()).await).await;
        }
    );
}

mod sentinel {
    use crate::support::sentinel::SentinelDeployment;
    use crate::support::shared::{Shared, connect};

    static DEPLOYMENT: Shared<SentinelDeployment> = Shared::new();

    tollgate::cache_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let deployment = DEPLOYMENT.get(SentinelDeployment::start);
            claim(connect(&deployment.url()).await).await;
        }
    );
}
