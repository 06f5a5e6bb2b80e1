//! Tables: printed line by line while they are measured, and written to a file at the end.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::bench::{Figures, Median, Processors};
use crate::plot;

/// The figure that ranks the contenders of a table.
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
    /// The unit of the points.
    pub unit: &'static str,
    pub points: Vec<u32>,
    /// The point that decides which contender is first.
    pub headline: u32,
    pub rank: Rank,
    /// The contender of ours that is compared with the peers, because it does the same work.
    pub ours: &'static str,
    /// The two sides whose processor time is measured: client and server.
    pub sides: [&'static str; 2],
    /// Whether to report the calls per task and the longest call.
    pub tells_shares: bool,
    /// A sentence about the figures.
    pub remark: String,
    /// The contenders, and why a contender does not compete.
    pub lines: Vec<(&'static str, Option<String>)>,
    /// By point and contender.
    pub medians: Vec<Vec<Median>>,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            name: "",
            title: "",
            text: "",
            unit: "",
            points: Vec::new(),
            headline: 0,
            rank: Rank::default(),
            ours: "tollgate",
            sides: ["client", "Redis"],
            tells_shares: false,
            remark: String::new(),
            lines: Vec::new(),
            medians: Vec::new(),
        }
    }
}

impl Table {
    /// The contenders that compete at a point, best first: `ours` and the peers.
    fn ranking(&self, at: usize) -> Vec<usize> {
        let competes = |line: &usize| {
            let (who, apart) = &self.lines[*line];
            apart.is_none() && (*who == self.ours || !who.starts_with("tollgate"))
        };
        let mut order: Vec<usize> = (0..self.lines.len()).filter(competes).collect();
        order.sort_by(|&one, &other| {
            let [one, other] = [one, other].map(|line| self.medians[at][line].figures);
            match self.rank {
                Rank::Rate => other.per_s.total_cmp(&one.per_s),
                Rank::Late => one.p99_us.total_cmp(&other.p99_us),
            }
        });
        order
    }

    /// The first contender at a point. `None` if the best median is not better than the best rounds of all others.
    fn first(&self, at: usize) -> Option<usize> {
        let ranking = self.ranking(at);
        let (&best, others) = ranking.split_first()?;
        let ours = self.medians[at][best].figures;
        let is_behind = |other: &Median| match self.rank {
            Rank::Rate => ours.per_s > other.per_s[1],
            Rank::Late => ours.p99_us < other.p99_us[0],
        };
        others.iter().all(|&other| is_behind(&self.medians[at][other])).then_some(best)
    }

    /// Whether Tollgate is first at a point. `None` if no peer competes.
    fn is_first(&self, at: usize) -> Option<bool> {
        let is_ours = |line: usize| self.lines[line].0 == self.ours;
        let has_peers = self.ranking(at).into_iter().any(|line| !is_ours(line));
        has_peers.then(|| self.first(at).is_some_and(is_ours))
    }

    fn print(&self) {
        for (point, medians) in self.points.iter().zip(&self.medians) {
            for ((who, _), median) in self.lines.iter().zip(medians) {
                let figures = median.figures;
                let costs = |busy| if self.rank == Rank::Late { "-".to_owned() } else { cost(figures, busy) };
                let [client, server] = self.sides.map(str::to_lowercase);
                let shares = if self.tells_shares {
                    format!(
                        " fewest={} most={} longest_us={}",
                        figures.fewest,
                        figures.most,
                        micros(figures.longest_us)
                    )
                } else {
                    String::new()
                };
                println!(
                    "RESULT table={} who={who} at={point} per_s={} p50_us={} p99_us={} rounds={} ceiling_ratio={} {client}_us={} {server}_us={} \
                     cores={:.2}{shares}",
                    self.name,
                    // Jobs that wait for their due time have no rate.
                    if self.rank == Rank::Late { "-".to_owned() } else { format!("{:.0}", figures.per_s) },
                    micros(figures.p50_us),
                    micros(figures.p99_us),
                    match self.rank {
                        Rank::Rate => format!("{:.0}..{:.0}", median.per_s[0], median.per_s[1]),
                        Rank::Late => format!("{:.0}..{:.0}", median.p99_us[0], median.p99_us[1]),
                    },
                    median.ceiling_ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                    costs(figures.busy.clients),
                    costs(figures.busy.servers),
                    figures.busy.clients + figures.busy.servers,
                );
            }
        }
    }

    fn write(&self, out: &mut String) {
        let remark = if self.remark.is_empty() { String::new() } else { format!(" {}", self.remark) };
        let _ = writeln!(out, "## {}\n\n{}{remark}\n", self.title, self.text);
        let columns: String = self.points.iter().map(|point| format!(" {} |", grouped(f64::from(*point)))).collect();
        let _ = writeln!(out, "| {} |{columns}", self.unit);
        let _ = writeln!(out, "| --- |{}", " ---: |".repeat(self.points.len()));
        for (line, (who, apart)) in self.lines.iter().enumerate() {
            let mark = if apart.is_some() { " *" } else { "" };
            let _ = write!(out, "| {who}{mark} |");
            for (at, medians) in self.medians.iter().enumerate() {
                let median = medians[line];
                let cell = self.cell(&median);
                let is_first = self.first(at) == Some(line) && self.is_first(at).is_some();
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
        self.write_shares(out);
        self.write_costs(out);
        let _ = writeln!(out, "\n![{}](benchmarks/{}.svg)\n", self.title, self.name);
    }

    fn write_shares(&self, out: &mut String) {
        if !self.tells_shares {
            return;
        }
        for (point, medians) in self.points.iter().zip(&self.medians) {
            let _ = writeln!(out, "\n| {point} {} | fewest of a task | most of a task | longest |", self.unit);
            let _ = writeln!(out, "| --- | ---: | ---: | ---: |");
            for ((who, _), median) in self.lines.iter().zip(medians) {
                let Figures { fewest, most, longest_us, .. } = median.figures;
                let [fewest, most] = [fewest, most].map(|count| grouped(count as f64));
                let _ = writeln!(out, "| {who} | {fewest} | {most} | {:.1} ms |", longest_us / 1e3);
            }
        }
    }

    /// The processor time of a call, if Redis or a server takes part in it.
    fn write_costs(&self, out: &mut String) {
        let is_measured = |median: &Median| median.figures.calls > 0 && median.figures.busy.servers > 0.0;
        if self.rank == Rank::Late || !self.medians.iter().flatten().any(is_measured) {
            return;
        }
        let columns: String = self.points.iter().map(|point| format!(" {} |", grouped(f64::from(*point)))).collect();
        let _ = writeln!(
            out,
            "\n| processor time of a call, {} + {}, and cores in use |{columns}",
            self.sides[0], self.sides[1]
        );
        let _ = writeln!(out, "| --- |{}", " ---: |".repeat(self.points.len()));
        for (line, (who, _)) in self.lines.iter().enumerate() {
            let _ = write!(out, "| {who} |");
            for medians in &self.medians {
                let figures = medians[line].figures;
                let Processors { clients, servers } = figures.busy;
                let [client, server] = [clients, servers].map(|busy| cost(figures, busy));
                let _ = write!(out, " {client} + {server} us, {:.2} |", clients + servers);
            }
            out.push('\n');
        }
    }

    fn cell(&self, median: &Median) -> String {
        let figures = median.figures;
        if self.rank == Rank::Late {
            let [least, most] = median.p99_us.map(|us| us / 1e3);
            let [p50, p99] = [figures.p50_us, figures.p99_us].map(|us| us / 1e3);
            return format!("{p50:.2} ms, {p99:.2} ms [{least:.2}..{most:.2}]");
        }
        let [least, most] = median.per_s.map(|per_s| plot::short(&per_s));
        let rate = format!("{}/s [{least}..{most}]", grouped(figures.per_s));
        let wait = if figures.p99_us > 0.0 { format!(", {} us", micros(figures.p99_us)) } else { String::new() };
        let share = median.ceiling_ratio.map_or(String::new(), |ratio| format!(" ({ratio:.2})"));
        format!("{rate}{share}{wait}")
    }
}

/// All results.
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

    /// Adds a part that is not a table of contenders.
    pub fn add_text(&mut self, text: &str) {
        self.costs.push_str(text);
    }

    /// Prints in how many tables Tollgate is first at the headline, and at how many of all points.
    pub fn print_verdict(&self) {
        for line in self.verdict() {
            println!("{line}");
        }
    }

    fn verdict(&self) -> Vec<String> {
        let (mut points, mut tables, mut lines) = ((0, 0), (0, 0), Vec::new());
        for table in &self.tables {
            for (at, point) in table.points.iter().enumerate() {
                let Some(is_first) = table.is_first(at) else { continue };
                points = (points.0 + u32::from(is_first), points.1 + 1);
                if *point == table.headline {
                    tables = (tables.0 + u32::from(is_first), tables.1 + 1);
                    let name = table.name;
                    match (is_first, table.first(at)) {
                        (true, _) => {}
                        (false, Some(first)) => {
                            lines.push(format!("BEHIND table={name} at={point} first={}", table.lines[first].0));
                        }
                        (false, None) => {
                            let best = table.ranking(at).into_iter().take(2).map(|line| table.lines[line].0);
                            lines.push(format!(
                                "TIED table={name} at={point} best={}",
                                best.collect::<Vec<_>>().join(",")
                            ));
                        }
                    }
                }
            }
        }
        lines.push(format!("first_at={} of={} points", points.0, points.1));
        lines.push(format!("first_in={} of={} tables", tables.0, tables.1));
        lines
    }

    /// Writes `benchmarks.md` and the plots beside it.
    pub fn write(&self, folder: &Path, server: &str) {
        let mut out = String::from(
            "# Benchmarks\n\n<!-- scripts/plot writes this part from the tables. -->\n<!-- end of the part -->\n\n\
             Written by `scripts/bench`, which runs Tollgate and its peers against the same Redis, in turns, in one run. \
             `scripts/bench --quick` prints the same lines in less time and writes nothing.\n\n",
        );
        let _ = writeln!(out, "| | |\n| --- | --- |");
        for (what, value) in machine(server) {
            let _ = writeln!(out, "| {what} | {value} |");
        }
        out.push_str(
            "\nClients and servers share that machine, so use the ratios, not the figures. All figures are medians of rounds in which \
             all contenders take turns, except in \"What it costs\" at the end. A cell has the calls per second, with the minimum and \
             the maximum of all rounds. Their ratio to the ceiling of the same round is in parentheses. The last figure is the 99th \
             percentile of the time of a call. A contender whose median is better than the best rounds of all others is first, and bold. \
             Without such a contender, the result is a tie. Peers are compared with `tollgate`, or with the contender that the table names, because it does the \
             same work. Peers are set up as their own documentation recommends.\n\n",
        );
        let _ = writeln!(out, "```text\n{}\n```\n", self.verdict().join("\n"));
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

/// The commit of the working tree, and whether the crate or the benchmarks have changed since.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=10", "HEAD"]) else { return "unknown".to_owned() };
    let code = ["status", "--porcelain", "--", ":/src", ":/lua", ":/benches", ":/Cargo.toml"];
    let is_clean = git(&code).is_some_and(|changes| changes.is_empty());
    if is_clean { commit } else { format!("{commit}, with changes") }
}

/// The machine and the versions of this run.
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
        ("commit".to_owned(), commit()),
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

/// The processor microseconds per call, with `busy` processors.
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

/// A number with thousands separators.
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
