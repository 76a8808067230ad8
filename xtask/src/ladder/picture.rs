//! The ladder as a picture: time over memory, and over the split.

use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::{Kind, Row};

const SIZE: (u32, u32) = (960, 420);
const GB: f64 = 1e9;
const LINE: RGBColor = RGBColor(31, 97, 141);
const FONT: &str = "sans-serif";

/// A point with the range of its repeats.
struct Point {
    x: f64,
    row: Row,
}

/// Writes the picture.
///
/// # Errors
/// A file that cannot be written.
pub fn draw(path: &Path, title: &str, rows: &[Row]) -> anyhow::Result<()> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        panels(&area, title, rows).map_err(|error| anyhow!("cannot draw: {error}"))?;
    }
    std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

fn panels(area: &Area<'_>, title: &str, rows: &[Row]) -> Drawn {
    area.fill(&WHITE)?;
    let of = |kind: Kind, x: fn(&Row) -> f64| -> Vec<Point> {
        let rows = rows.iter().filter(|r| r.kind == kind);
        rows.map(|row| Point { x: x(row), row: row.clone() }).collect()
    };
    let budgets = of(Kind::Budget, |r| r.budget_bytes as f64 / GB);
    let splits = of(Kind::Split, |r| r.pinned_layers as f64);
    let area = area.titled(title, (FONT, 18))?;
    if splits.is_empty() {
        panel(&area, "seconds per token over memory", "memory, GB", &budgets)?;
    } else {
        let at = splits.first().map_or(0.0, |p| p.row.budget_bytes as f64 / GB);
        let (left, right) = area.split_horizontally((50).percent_width());
        panel(&left, "seconds per token over memory", "memory, GB", &budgets)?;
        let caption = format!("the same at {at:.1} GB, over pinned layers");
        panel(&right, &caption, "pinned layers; the rest holds experts", &splits)?;
    }
    area.present()?;
    Ok(())
}

fn panel(area: &Area<'_>, caption: &str, x_label: &str, points: &[Point]) -> Drawn {
    let most = |value: fn(&Point) -> f64| points.iter().map(value).fold(0.0, f64::max);
    let x_end = (most(|p| p.x) * 1.05).max(1.0);
    let y_end = (most(|p| p.row.seconds_per_token.most) * 1.1).max(1e-9);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(caption, (FONT, 15))
        .x_label_area_size(38)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..x_end, 0.0..y_end)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(x_label).y_desc("s per token").disable_x_mesh().max_light_lines(1).draw()?;
    let mean = |p: &Point| (p.x, p.row.seconds_per_token.mean);
    chart.draw_series(LineSeries::new(points.iter().map(mean), LINE.stroke_width(2)))?;
    chart.draw_series(points.iter().map(|p| Circle::new(mean(p), 4, LINE.filled())))?;
    chart.draw_series(points.iter().map(|p| {
        let spread = p.row.seconds_per_token;
        PathElement::new([(p.x, spread.least), (p.x, spread.most)], LINE)
    }))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_k3::Spread;

    fn row(kind: Kind, gb: u64, pinned: usize, seconds: f64) -> Row {
        Row {
            kind,
            preset: "pocket",
            budget_bytes: gb * 1_000_000_000,
            pinned_layers: pinned,
            pinned_head: false,
            expert_slots: 0,
            seconds_per_token: Spread {
                mean: seconds,
                median: seconds,
                least: seconds * 0.9,
                most: seconds * 1.2,
            },
            waited_seconds_per_token: 0.0,
            bytes_per_token: 0.0,
            expert_hit_rate: 0.0,
            peak_rss_bytes: 0,
        }
    }

    #[test]
    fn both_panels_are_drawn_with_every_point() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ladder.svg");
        let rows = [
            row(Kind::Budget, 1, 0, 3.0),
            row(Kind::Budget, 8, 4, 1.0),
            row(Kind::Split, 8, 0, 2.0),
            row(Kind::Split, 8, 5, 1.0),
        ];
        draw(&path, "a model", &rows).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert_eq!(svg.matches("<circle").count(), rows.len());
        for text in ["a model", "memory, GB", "the same at 8.0 GB", "s per token"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        draw(&path, "a model", &rows[..1]).unwrap();
        assert!(!std::fs::read_to_string(&path).unwrap().contains("the same at"));
        assert!(draw(&dir.path().join("absent/x.svg"), "", &rows).is_err());
    }
}
