//! Takes the first program out of the docs, so that it is tested as it stands there.

use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=../../src/lib.rs");
    let docs = fs::read_to_string("../../src/lib.rs").expect("the crate is two folders up");
    let docs: Vec<_> = docs.lines().map_while(|line| line.strip_prefix("//!")).collect();
    let block = |opening: &str| {
        let inside = docs.iter().skip_while(|line| **line != opening).skip(1).take_while(|line| **line != " ```");
        inside.map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line))).collect::<String>()
    };
    // Port 3000 may be taken.
    let program = block(" ```no_run")
        .replace("\"127.0.0.1:3000\"", "super::address()")
        .replace("async fn main", "pub(super) async fn main");
    let folder = env::var_os("OUT_DIR").expect("Cargo says where to write");
    fs::write(Path::new(&folder).join("first_program.rs"), program).expect("it can be written");
    fs::write(Path::new(&folder).join("first_program.toml"), block(" ```toml")).expect("it can be written");
}
