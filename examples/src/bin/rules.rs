//! Rate limits from a file, reloaded while the program runs.
//!
//! ```text
//! cargo run -p tollgate-examples --bin rules                 on a file of its own, ends by itself
//! cargo run -p tollgate-examples --bin rules -- rules.toml   on yours: asks for /api/orders once a second, edit the file meanwhile
//! ```
//!
//! Two of four requests pass, and four of four after the file has changed. Then a mistake in the file is reported with its line, and the
//! old rules stay.

use std::convert::Infallible;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs, iter};

use http::{Request, Response};
use tokio::time::sleep;
use tollgate::config::{Rules, RulesLayer};
use tollgate::{BoxError, MemoryBackend};
use tower::{Layer, Service, ServiceExt, service_fn};

#[tokio::main]
async fn main() -> ExitCode {
    let result = match env::args().nth(1) {
        Some(file) => follow(Path::new(&file)).await,
        None => show().await,
    };
    if let Err(error) = &result {
        eprintln!("{}.", chain(&**error));
    }
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// An error and its causes, in one line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut levels: Vec<_> = iter::successors(Some(error), |&error| error.source()).map(ToString::to_string).collect();
    // Errors of other crates may repeat their cause in their own text.
    levels.dedup();
    levels.join(": ")
}

/// Rules with this quota per minute for all requests below /api/.
fn rules(quota: &str) -> String {
    format!(
        r#"[policies.api]
limits = [{{ quota = {quota}, per = "1m", algorithm = "fixed_window" }}]
[[rules]]
path = "/api/{{*rest}}"
policy = "api"
key = "global"
"#
    )
}

async fn show() -> Result<(), BoxError> {
    let folder = env::temp_dir().join(format!("tollgate-rules-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let file = folder.join("rules.toml");
    write(&file, &rules("2"))?;

    let layer = RulesLayer::new(MemoryBackend::new(), Rules::from_path(&file)?);
    let (handle, service) = (layer.handle(), layer.layer(service()));
    let watch = handle.watch_every(Duration::from_millis(20), &file);

    println!("2 a minute:\n{}", fs::read_to_string(&file)?);
    ask(&service, 4).await;

    println!("\nNow the file says 8 a minute. The counts stay.");
    let before = handle.rules();
    write(&file, &rules("8"))?;
    until(|| handle.rules() != before).await?;
    ask(&service, 4).await;

    println!("\nNow it says nonsense, and the rules stay as they are:");
    write(&file, &rules("\"many\""))?;
    until(|| handle.last_error().is_some()).await?;
    println!("{}", handle.last_error().map(|error| error.to_string()).unwrap_or_default());
    ask(&service, 3).await;

    drop(watch);
    Ok(fs::remove_dir_all(&folder)?)
}

/// Until Ctrl-C.
async fn follow(file: &Path) -> Result<(), BoxError> {
    let layer = RulesLayer::new(MemoryBackend::new(), Rules::from_path(file)?);
    let (handle, service) = (layer.handle(), layer.layer(service()));
    let _watch = handle.watch(file);
    loop {
        ask(&service, 1).await;
        handle.last_error().inspect(|error| println!("{error}"));
        sleep(Duration::from_secs(1)).await;
    }
}

fn service() -> impl Service<Request<()>, Response = Response<()>, Error = Infallible> + Clone {
    service_fn(async |_: Request<()>| Ok(Response::new(())))
}

async fn ask<S, B>(service: &S, times: usize)
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible> + Clone,
{
    for _ in 0..times {
        let request = Request::get("/api/orders").body(()).expect("the request is well-formed");
        let Ok(response) = service.clone().oneshot(request).await;
        let standing = response.headers().get("ratelimit").and_then(|value| value.to_str().ok()).unwrap_or("-");
        println!("GET /api/orders  {:<21}  {standing}", response.status().to_string());
    }
}

/// Writes a temporary file and renames it, so that a reload never reads half of a file.
fn write(file: &Path, text: &str) -> Result<(), std::io::Error> {
    let fresh = file.with_extension("fresh");
    fs::write(&fresh, text)?;
    fs::rename(fresh, file)
}

async fn until(condition: impl Fn() -> bool) -> Result<(), BoxError> {
    let changed = async {
        while !condition() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), changed).await.map_err(|_| "the file was not read again".into())
}
