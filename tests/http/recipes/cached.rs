use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{StatusCode, header::CACHE_CONTROL};
use axum::{Router, routing::get};
use tokio::sync::Mutex;
use tollgate::cache::CacheError;
use tollgate::{AnyBackend, BoxError, Cache, CacheLayer};

/// The names of products, in place of your database.
#[derive(Clone, Default)]
struct Database(Arc<Mutex<HashMap<u64, String>>>);

impl Database {
    /// SELECT name FROM products WHERE id = $1
    async fn select(&self, id: u64) -> Result<Option<String>, BoxError> {
        Ok(self.0.lock().await.get(&id).cloned())
    }

    /// UPDATE products SET name = $2 WHERE id = $1
    async fn update(&self, id: u64, name: String) -> Result<(), BoxError> {
        self.0.lock().await.insert(id, name);
        Ok(())
    }
}

#[derive(Clone)]
struct Products {
    cache: Cache<String>,
    database: Database,
}

impl Products {
    fn new(backend: AnyBackend, database: Database) -> Self {
        let cache = Cache::new(backend, "products", Duration::from_secs(300))
            .stale_for(Duration::from_secs(3_600)) // while it is loaded again, and while the database fails
            .absent_for(Duration::from_secs(30));
        Self { cache, database }
    }

    async fn find(&self, id: u64) -> Result<Option<Arc<String>>, CacheError> {
        let database = self.database.clone();
        self.cache.get_or_fill(id, async move || database.select(id).await).await
    }

    async fn rename(&self, id: u64, name: String) -> Result<(), BoxError> {
        self.database.update(id, name).await?;
        Ok(self.cache.invalidate(id).await?) // after the commit
    }
}

async fn product(State(products): State<Products>, Path(id): Path<u64>) -> Result<String, StatusCode> {
    let name = products.find(id).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    name.map(|name| name.to_string()).ok_or(StatusCode::NOT_FOUND)
}

async fn rename(State(products): State<Products>, Path(id): Path<u64>, name: String) -> StatusCode {
    match products.rename(id, name).await {
        Ok(()) => StatusCode::NO_CONTENT,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE, // the client repeats it, and so the invalidation
    }
}

fn app(backend: AnyBackend, database: Database) -> Router {
    let pages = Router::new()
        .route("/news", get(async || ([(CACHE_CONTROL, "max-age=60, stale-if-error=600")], "news")))
        .layer(CacheLayer::new(backend.clone(), "pages").public());
    let products = Products::new(backend, database);
    Router::new().route("/products/{id}", get(product).put(rename)).with_state(products).merge(pages)
}

#[cfg(test)]
mod tests {
    use http::Method;

    use super::super::{App, Client, backend};
    use super::*;
    use crate::support::server::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn processes_share_values_and_their_changes() {
        let redis = RedisServer::start();
        let (database, client) = (Database::default(), Client::new());
        database.update(1, "pen".into()).await.unwrap();
        let first = App::serve(app(backend(&redis).await, database.clone())).await;
        let second = App::serve(app(backend(&redis).await, database.clone())).await;
        assert_eq!(client.get(first.addr, "/products/1", &[]).await.body, "pen");
        assert_eq!(client.get(first.addr, "/products/2", &[]).await.status, 404);

        // A change without an invalidation is not seen, so these are cached values.
        database.update(1, "brush".into()).await.unwrap();
        database.update(2, "ink".into()).await.unwrap();
        for server in [first.addr, second.addr] {
            assert_eq!(client.get(server, "/products/1", &[]).await.body, "pen");
            assert_eq!(client.get(server, "/products/2", &[]).await.status, 404);
        }
        assert_eq!(client.send(Method::PUT, second.addr, "/products/1", &[], "pencil").await.status, 204);
        for server in [first.addr, second.addr] {
            assert_eq!(client.get(server, "/products/1", &[]).await.body, "pencil");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn page_is_made_once_for_all_processes() {
        let redis = RedisServer::start();
        let client = Client::new();
        let first = App::serve(app(backend(&redis).await, Database::default())).await;
        let second = App::serve(app(backend(&redis).await, Database::default())).await;
        let made = client.get(first.addr, "/news", &[]).await;
        assert_eq!((made.body.as_str(), made.header("cache-status").contains("fwd=miss")), ("news", true), "{made:?}");
        super::super::eventually("the page is stored", async || {
            client.get(second.addr, "/news", &[]).await.header("cache-status").contains("; hit")
        })
        .await;
    }
}
