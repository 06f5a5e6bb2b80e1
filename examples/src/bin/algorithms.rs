//! Draws the plot of the guide on algorithms: four limits under the same traffic, in memory, with a paused clock.
//!
//! ```text
//! cargo run -p tollgate-examples --bin algorithms                  writes docs/guide/algorithms.svg and algorithms.link
//! cargo run -p tollgate-examples --bin algorithms -- /tmp/folder   writes both files there
//! ```

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::{Instant, advance};
use tollgate::rate_limit::Limit;
use tollgate::{ConfigError, Limiter, MemoryBackend, Policy, Quota, StoreError};

const QUOTA: u64 = 10;
const WINDOW_MS: u64 = 10_000;
const END_MS: u64 = 40_000;

/// Width, height and margins of the drawing, in pixels.
const WIDTH: u64 = 760;
const PANEL: u64 = 118;
const LEFT: u64 = 20;
const SCALE: u64 = 18;

struct Request {
    at_ms: u64,
    is_allowed: bool,
    /// The requests that were allowed in the window that ends here.
    recent: usize,
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::args().nth(1).map_or_else(|| PathBuf::from("docs/guide"), PathBuf::from);
    let svg = draw(&run_all().await?)?;
    // rustdoc shows no file beside the page, so there the link is the drawing itself.
    fs::write(folder.join("algorithms.link"), format!("[plot]: data:image/svg+xml,{}\n", percent_encode(&svg)))?;
    fs::write(folder.join("algorithms.svg"), svg)?;
    Ok(())
}

/// Sends the same requests through each algorithm.
async fn run_all() -> Result<Vec<(&'static str, Vec<Request>)>, Box<dyn Error>> {
    let mut panels = Vec::new();
    for (name, limit) in limits()? {
        panels.push((name, run(limit).await?));
    }
    Ok(panels)
}

fn limits() -> Result<[(&'static str, Limit); 4], ConfigError> {
    let quota = Quota::new(QUOTA, Duration::from_millis(WINDOW_MS))?;
    Ok([
        ("token_bucket()", quota.token_bucket()),
        ("fixed_window()", quota.fixed_window()),
        ("sliding_window()", quota.sliding_window()),
        ("sliding_log()?", quota.sliding_log()?),
    ])
}

/// A single request, a burst around the end of the first window, silence, and then twice the quota, evenly spread.
fn traffic() -> impl Iterator<Item = u64> {
    let burst = (7_000..13_000).step_by(200);
    let steady = (20_000..END_MS).step_by(500);
    std::iter::once(0).chain(burst).chain(steady)
}

async fn run(limit: Limit) -> Result<Vec<Request>, StoreError> {
    let limiter = Limiter::new(MemoryBackend::new(), Policy::new("plot", limit));
    let begun = Instant::now();
    let mut requests: Vec<Request> = Vec::new();
    for at_ms in traffic() {
        advance(Duration::from_millis(at_ms) - begun.elapsed()).await;
        let is_allowed = limiter.try_acquire("client").await?;
        let in_window = requests.iter().filter(|request| request.is_allowed && request.at_ms + WINDOW_MS > at_ms);
        let recent = in_window.count() + usize::from(is_allowed);
        requests.push(Request { at_ms, is_allowed, recent });
    }
    Ok(requests)
}

fn draw(panels: &[(&str, Vec<Request>)]) -> Result<String, std::fmt::Error> {
    let height = PANEL * panels.len() as u64 + 44;
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0,0,{WIDTH},{height}' \
         font-family='sans-serif' font-size='13'>\n<rect width='{WIDTH}' height='{height}' fill='white'/>\n"
    );
    for (number, (name, requests)) in panels.iter().enumerate() {
        let (top, base) = (PANEL * number as u64 + 18, PANEL * number as u64 + 92);
        let allowed = requests.iter().filter(|request| request.is_allowed).count();
        let most = requests.iter().map(|request| request.recent).max().unwrap_or_default();
        writeln!(
            svg,
            "<text x='{LEFT}' y='{top}' font-weight='bold' font-family='monospace'>{name}</text>\n\
             <text x='{right}' y='{top}' text-anchor='end'>{allowed} of {all} allowed, at most {most} in 10 s</text>",
            right = WIDTH - LEFT,
            all = requests.len(),
        )?;
        for (is_allowed, color, height) in [(true, "darkblue", 58), (false, "orange", 26)] {
            let mut path = String::new();
            for request in requests.iter().filter(|request| request.is_allowed == is_allowed) {
                write!(path, "M{x},{base}v-{height}", x = LEFT + request.at_ms * SCALE / 1_000)?;
            }
            writeln!(svg, "<path d='{path}' stroke='{color}' stroke-width='2'/>")?;
        }
        writeln!(svg, "<path d='M{LEFT},{base}H{right}' stroke='gray'/>", right = LEFT + END_MS * SCALE / 1_000)?;
        for second in (0..=END_MS / 1_000).step_by(10) {
            let x = LEFT + second * SCALE;
            writeln!(svg, "<text x='{x}' y='{y}' fill='gray' text-anchor='middle'>{second}</text>", y = base + 14)?;
        }
    }
    let legend = PANEL * panels.len() as u64 + 26;
    writeln!(
        svg,
        "<text x='{LEFT}' y='{legend}'>Quota: {QUOTA} in 10 s. One line is a request: <tspan fill='darkblue' \
         font-weight='bold'>long, allowed</tspan>; <tspan fill='darkorange' font-weight='bold'>short, denied</tspan>. \
         Time in seconds.</text>\n</svg>"
    )?;
    Ok(svg)
}

/// Escapes everything that would end a link in Markdown or in a URL.
fn percent_encode(svg: &str) -> String {
    let mut url = String::new();
    for byte in svg.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b',' | b'/' | b':' | b'=' | b';' => {
                url.push(byte.into());
            }
            _ => url.extend(['%', hex(byte >> 4), hex(byte & 15)]),
        }
    }
    url
}

fn hex(digit: u8) -> char {
    char::from(b"0123456789ABCDEF"[usize::from(digit)])
}
