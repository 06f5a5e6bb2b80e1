//! Tables: printed line by line while they are measured, and written down together in the end.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::bench::{Figures, Median, Processors};
use crate::plot;

/// By what a table says who is first.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Rank {
    /// The highest rate.
    #[default]
    Rate,
    /// The lowest 99th percentile.
    Late,
}

/// Measurements of several contenders at several points.
pub struct Table {
    pub name: &'static str,
    pub title: &'static str,
    pub text: &'static str,
    /// What the points are numbers of.
    pub unit: &'static str,
    pub points: Vec<u32>,
    /// The point that says who is first.
    pub headline: u32,
    pub rank: Rank,
    /// Who, and why it does not compete.
    pub lines: Vec<(&'static str, Option<String>)>,
    /// By point and contender.
    pub medians: Vec<Vec<Median>>,
}

impl Table {
    /// The contenders that compete, best first, at a point.
    fn ranking(&self, at: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.lines.len()).filter(|line| self.lines[*line].1.is_none()).collect();
        order.sort_by(|&one, &other| {
            let [one, other] = [one, other].map(|line| self.medians[at][line].figures);
            match self.rank {
                Rank::Rate => other.per_s.total_cmp(&one.per_s),
                Rank::Late => one.p99_us.total_cmp(&other.p99_us),
            }
        });
        order
    }

    /// Whether Tollgate is first at a point; `None` where it is alone.
    fn is_first(&self, at: usize) -> Option<bool> {
        let ranking = self.ranking(at);
        (ranking.len() > 1).then(|| self.lines[ranking[0]].0.starts_with("tollgate"))
    }

    fn print(&self) {
        for (point, medians) in self.points.iter().zip(&self.medians) {
            for ((who, _), median) in self.lines.iter().zip(medians) {
                let figures = median.figures;
                println!(
                    "RESULT table={} who={who} at={point} per_s={} p50_us={} p99_us={} ceiling_ratio={} client_us={} redis_us={} cores={:.2}",
                    self.name,
                    // How many come is no figure of theirs who wait for a clock.
                    if self.rank == Rank::Late { "-".to_owned() } else { format!("{:.0}", figures.per_s) },
                    micros(figures.p50_us),
                    micros(figures.p99_us),
                    median.ceiling_ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                    cost(figures, figures.busy.clients),
                    cost(figures, figures.busy.servers),
                    figures.busy.clients + figures.busy.servers,
                );
            }
        }
    }

    fn write(&self, out: &mut String) {
        let _ = writeln!(out, "## {}\n\n{}\n", self.title, self.text);
        let columns: String = self.points.iter().map(|point| format!(" {} |", grouped(f64::from(*point)))).collect();
        let _ = writeln!(out, "| {} |{columns}", self.unit);
        let _ = writeln!(out, "| --- |{}", " ---: |".repeat(self.points.len()));
        for (line, (who, apart)) in self.lines.iter().enumerate() {
            let mark = if apart.is_some() { " *" } else { "" };
            let _ = write!(out, "| {who}{mark} |");
            for (at, medians) in self.medians.iter().enumerate() {
                let median = medians[line];
                let cell = self.cell(&median);
                let is_first = self.ranking(at).first() == Some(&line) && self.is_first(at).is_some();
                let _ = write!(out, " {} |", if is_first { format!("**{cell}**") } else { cell });
            }
            out.push('\n');
        }
        out.push('\n');
        for (who, apart) in &self.lines {
            if let Some(why) = apart {
                let _ = writeln!(out, "\\* {who}: {why}  ");
            }
        }
        self.write_costs(out);
        let _ = writeln!(out, "\n![{}](benchmarks/{}.svg)\n", self.title, self.name);
    }

    /// What a call takes of the processors, where Redis has a part in it.
    fn write_costs(&self, out: &mut String) {
        let is_told = |median: &Median| median.figures.calls > 0 && median.figures.busy.servers > 0.0;
        if self.rank == Rank::Late || !self.medians.iter().flatten().any(is_told) {
            return;
        }
        let columns: String = self.points.iter().map(|point| format!(" {} |", grouped(f64::from(*point)))).collect();
        let _ = writeln!(out, "\n| processor time of a call, client + Redis, and cores in use |{columns}");
        let _ = writeln!(out, "| --- |{}", " ---: |".repeat(self.points.len()));
        for (line, (who, _)) in self.lines.iter().enumerate() {
            let _ = write!(out, "| {who} |");
            for medians in &self.medians {
                let figures = medians[line].figures;
                let Processors { clients, servers } = figures.busy;
                let [client, redis] = [clients, servers].map(|busy| cost(figures, busy));
                let _ = write!(out, " {client} + {redis} us, {:.2} |", clients + servers);
            }
            out.push('\n');
        }
    }

    fn cell(&self, median: &Median) -> String {
        let figures = median.figures;
        if self.rank == Rank::Late {
            return format!("{:.2} ms, {:.2} ms", figures.p50_us / 1e3, figures.p99_us / 1e3);
        }
        let rate = format!("{}/s", grouped(figures.per_s));
        let wait = if figures.p99_us > 0.0 { format!(", {} us", micros(figures.p99_us)) } else { String::new() };
        let share = median.ceiling_ratio.map_or(String::new(), |ratio| format!(" ({ratio:.2})"));
        format!("{rate}{share}{wait}")
    }
}

/// All that was measured.
#[derive(Default)]
pub struct Report {
    tables: Vec<Table>,
    /// Lists of costs, ready to be written.
    costs: String,
}

impl Report {
    pub fn add(&mut self, table: Table) {
        table.print();
        self.tables.push(table);
    }

    /// Takes down a part that is no table of contenders.
    pub fn add_text(&mut self, text: &str) {
        self.costs.push_str(text);
    }

    /// Says in how many tables Tollgate is first, at their headline, and at how many of all points.
    pub fn print_verdict(&self) {
        let (mut points, mut tables) = ((0, 0), (0, 0));
        for table in &self.tables {
            for (at, point) in table.points.iter().enumerate() {
                let Some(is_first) = table.is_first(at) else { continue };
                points = (points.0 + u32::from(is_first), points.1 + 1);
                if *point == table.headline {
                    tables = (tables.0 + u32::from(is_first), tables.1 + 1);
                    if !is_first {
                        let first = table.lines[table.ranking(at)[0]].0;
                        println!("BEHIND table={} at={point} first={first}", table.name);
                    }
                }
            }
        }
        println!("first_at={} of={} points", points.0, points.1);
        println!("first_in={} of={} tables", tables.0, tables.1);
    }

    /// Writes `benchmarks.md` and the plots beside it.
    pub fn write(&self, folder: &Path, server: &str) {
        let mut out = String::from(
            "# Benchmarks\n\nWritten by `scripts/bench`, which runs Tollgate and its peers against the same Redis, in turns, in one run. \
             `scripts/bench --quick` prints the same lines in less time and writes nothing.\n\n",
        );
        let _ = writeln!(out, "| | |\n| --- | --- |");
        for (what, value) in machine(server) {
            let _ = writeln!(out, "| {what} | {value} |");
        }
        out.push_str(
            "\nClients and servers share that machine: take the ratios, not the figures. All are medians of rounds in which everybody takes turns. \
             A cell has calls a second, in brackets their share of the ceiling that was measured in the same round, and the 99th percentile of the time of a \
             call; the best of a column is bold. Peers are set up as their own documentation recommends.\n\n",
        );
        for table in &self.tables {
            table.write(&mut out);
            let path = folder.join("benchmarks").join(format!("{}.svg", table.name));
            plot::write(table, &path);
        }
        out.push_str(&self.costs);
        let path = folder.join("benchmarks.md");
        fs::write(&path, out.trim_end().to_owned() + "\n")
            .unwrap_or_else(|error| panic!("{} cannot be written: {error}", path.display()));
    }
}

/// What all of it was measured on.
fn machine(server: &str) -> Vec<(String, String)> {
    let first_line = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output().ok()?;
        String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
    };
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or("unknown")
        .trim_matches([' ', '\t', ':']);
    let count = std::thread::available_parallelism().map_or(0, usize::from);
    let mut all = vec![
        ("processor".to_owned(), format!("{count} virtual cores of {model}")),
        ("server".to_owned(), server.to_owned()),
        ("compiler".to_owned(), first_line("rustc", "--version").unwrap_or_default()),
    ];
    if let Some(version) = first_line("node", "--version") {
        all.push(("Node".to_owned(), version));
    }
    let lock = include_str!("../../../Cargo.lock");
    let peers = [
        "actix-extensible-rate-limit",
        "apalis-redis",
        "bb8-redis",
        "governor",
        "limitador",
        "rslock",
        "tower_governor",
    ];
    let versions = peers.map(|peer| {
        let entry = lock.split("[[package]]").find(|entry| entry.contains(&format!("name = \"{peer}\"\n")));
        let version = entry.and_then(|entry| entry.split("version = \"").nth(1)?.split('"').next());
        format!("{peer} {}", version.unwrap_or("?"))
    });
    let features = include_str!("../../../Cargo.toml").lines().find_map(|line| line.strip_prefix("tollgate = "));
    let features = features.and_then(|line| line.split_once("features = [")?.1.split_once(']'));
    let features = features.map_or("?".to_owned(), |(features, _)| features.replace('"', ""));
    all.push(("features of Tollgate".to_owned(), format!("the default ones, {features}")));
    all.push(("peers".to_owned(), versions.join(", ")));
    let node = include_str!("../../../node/package.json");
    let versions = ["bullmq", "ioredis", "rate-limiter-flexible", "redlock"].map(|peer| {
        let version = node.split(&format!("\"{peer}\": \"")).nth(1).and_then(|rest| rest.split('"').next());
        format!("{peer} {}", version.unwrap_or("?"))
    });
    all.push(("peers on Node".to_owned(), versions.join(", ")));
    all
}

/// The microseconds of processors that a call takes, so many of which are busy.
fn cost(figures: Figures, busy: f64) -> String {
    if figures.calls == 0 || figures.per_s <= 0.0 {
        "-".to_owned()
    } else {
        format!("{:.1}", busy / figures.per_s * 1e6)
    }
}

fn micros(us: f64) -> String {
    match us {
        us if us <= 0.0 => "-".to_owned(),
        us if us < 10.0 => format!("{us:.3}"),
        us => format!("{us:.0}"),
    }
}

/// A number with its thousands apart.
pub fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
