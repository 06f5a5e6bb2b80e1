//! The idempotency contract on the memory backend, with a paused clock, and on real Redis servers.

mod memory {
    tollgate::idempotency_contract!(
        #[tokio::test(start_paused = true)]
        |claim| {
            let backend = tollgate::MemoryBackend::new();
            claim(backend.clone()).await;
        }
    );
}

mod redis_server {
    use crate::support::server::RedisServer;
    use crate::support::shared::patient;

    tollgate::idempotency_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let server = RedisServer::start();
            claim(patient(server.url()).await).await;
            let mut connection = server.connection();
            let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
            for key in keys {
                let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
                // -2: the key has expired since it was listed.
                assert!(ttl >= 0 || ttl == -2, "{key} has no expiry: {ttl}");
            }
        }
    );
}
