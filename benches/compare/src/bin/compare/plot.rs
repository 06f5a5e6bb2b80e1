//! Plots of tables: lines over their points, or bars where there is one point only.

use std::fs;
use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::combinators::BindKeyPoints;
use plotters::prelude::*;

use crate::report::{Rank, Table};

const SIZE: (u32, u32) = (960, 420);
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

pub fn write(table: &Table, path: &Path) {
    let written = path.parent().map_or(Ok(()), fs::create_dir_all).map_err(Into::into).and_then(|()| draw(table, path));
    written.unwrap_or_else(|error| panic!("{} cannot be drawn: {error}", path.display()));
}

fn draw(table: &Table, path: &Path) -> Drawn {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let rates = |at: usize, line: usize| table.medians[at][line].figures.per_s;
    let waits = |at: usize, line: usize| table.medians[at][line].figures.p99_us;
    if table.points.len() == 1 {
        if table.rank == Rank::Late {
            bars(&root, table, "99th percentile, us", waits)?
        } else {
            bars(&root, table, "a second", rates)?
        }
    } else {
        let (left, right) = root.split_horizontally(SIZE.0 / 2);
        lines(&left, table, "a second", rates)?;
        lines(&right, table, "99th percentile, us", waits)?;
    }
    root.present()?;
    Ok(())
}

/// Marks a contender that does not compete, as in the table.
fn name(who: &str, apart: Option<&String>) -> String {
    format!("{who}{}", if apart.is_some() { " *" } else { "" })
}

/// Labels at 1, 2 and 5 of each decade, or at the decades only if those would be too many.
fn labels(bottom: f64, top: f64) -> Vec<f64> {
    let decades = bottom.log10().floor() as i32..=top.log10().ceil() as i32;
    let steps: &[f64] = if top / bottom > 3e3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let all = decades.flat_map(|decade| steps.iter().map(move |step| step * 10_f64.powi(decade)));
    all.filter(|label| (bottom..=top).contains(label)).collect()
}

/// A contender that does not compete is pale.
fn color(line: usize, is_apart: bool) -> RGBAColor {
    const COLORS: [RGBColor; 9] = [
        RGBColor(200, 30, 30),
        RGBColor(31, 119, 180),
        RGBColor(44, 140, 44),
        RGBColor(148, 103, 189),
        RGBColor(230, 140, 20),
        RGBColor(100, 100, 100),
        RGBColor(23, 170, 190),
        RGBColor(140, 86, 75),
        RGBColor(220, 110, 180),
    ];
    COLORS[line % COLORS.len()].mix(if is_apart { 0.4 } else { 1.0 })
}

/// Both axes are logarithmic, since points and figures span decades.
fn lines(area: &Area<'_>, table: &Table, what: &str, value: impl Fn(usize, usize) -> f64) -> Drawn {
    let all = || (0..table.points.len()).flat_map(|at| (0..table.lines.len()).map(move |line| (at, line)));
    let values = || all().map(|(at, line)| value(at, line)).filter(|value| *value > 0.0);
    let (least, most) = (values().fold(f64::MAX, f64::min), values().fold(0.0, f64::max));
    if most <= 0.0 {
        return Ok(());
    }
    let first = f64::from(table.points.first().copied().unwrap_or(1).max(1));
    let last = f64::from(table.points.last().copied().unwrap_or(1));
    let (bottom, top) = (least * 0.3, most * 1.4);
    let points = table.points.iter().map(|point| f64::from(*point)).collect();
    let mut chart = ChartBuilder::on(area)
        .caption(what, (FONT, 16))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(70)
        .build_cartesian_2d(
            (first..last).log_scale().with_key_points(points),
            (bottom..top).log_scale().with_key_points(labels(bottom, top)),
        )?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(table.unit)
        .x_label_formatter(&short)
        .y_label_formatter(&short)
        .draw()?;
    for (line, (who, apart)) in table.lines.iter().enumerate() {
        let color = color(line, apart.is_some());
        let points: Vec<(f64, f64)> =
            table.points.iter().enumerate().map(|(at, point)| (f64::from(*point), value(at, line))).collect();
        let points = points.into_iter().filter(|(_, value)| *value > 0.0);
        let style = color.stroke_width(if line == 0 { 3 } else { 1 });
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(name(who, apart.as_ref()))
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], style));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.7))
        .position(SeriesLabelPosition::LowerRight)
        .label_font((FONT, 12))
        .draw()?;
    Ok(())
}

fn bars(area: &Area<'_>, table: &Table, what: &str, value: impl Fn(usize, usize) -> f64) -> Drawn {
    let count = table.lines.len();
    let most = (0..count).map(|line| value(0, line)).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(what, (FONT, 16))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(180)
        .build_cartesian_2d(0.0..most * 1.15, count as f64..0.0)?;
    chart.configure_mesh().disable_mesh().disable_y_axis().y_labels(0).x_label_formatter(&short).draw()?;
    for (line, (who, apart)) in table.lines.iter().enumerate() {
        let (top, bottom) = (line as f64 + 0.15, line as f64 + 0.85);
        chart.draw_series([Rectangle::new(
            [(0.0, top), (value(0, line), bottom)],
            color(line, apart.is_some()).filled(),
        )])?;
        let label = format!("{} {}", name(who, apart.as_ref()), short(&value(0, line)));
        let style = (FONT, 13).into_font().color(&BLACK);
        chart.draw_series([Text::new(label, (most * 0.01, top + 0.2), style)])?;
    }
    Ok(())
}

/// A number in few characters.
pub fn short(value: &f64) -> String {
    match *value {
        value if value >= 1e6 => format!("{}M", trimmed(value / 1e6)),
        value if value >= 1e3 => format!("{}k", trimmed(value / 1e3)),
        value => trimmed(value),
    }
}

fn trimmed(value: f64) -> String {
    let text = if value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}
