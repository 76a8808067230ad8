//! A map of the memory as SVG: one bar per plan, one part per line of the ledger.

use std::fmt::Write as _;

use k3_pipeline::plan::Plan;
use k3_pipeline::units::Bytes;

const BAR_WIDTH: f64 = 640.0;
const BAR_HEIGHT: f64 = 44.0;
const LEFT: f64 = 20.0;
const ROW: f64 = 18.0;
/// Colours of the parts, in the order of the ledger.
const COLOURS: [&str; 16] = [
    "#1f4e79", "#2e75b6", "#c55a11", "#548235", "#f4b183", "#7030a0", "#9e7bb5", "#bf9000", "#8a8a8a",
    "#3a8f8f", "#66b2b2", "#a0a0a0", "#b5651d", "#6b6b9b", "#9b6b6b", "#404040",
];

/// The whole picture. Every bar has the same width: shares are compared, sizes are written.
pub(super) fn svg(plans: &[&Plan]) -> String {
    let mut body = String::new();
    let mut y = 20.0;
    for plan in plans {
        y = bar(&mut body, plan, y);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {y:.0}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n",
        BAR_WIDTH + 2.0 * LEFT
    )
}

/// Draws one plan below `y`; returns where the next one starts.
fn bar(body: &mut String, plan: &Plan, mut y: f64) -> f64 {
    let total = plan.ledger.total_bytes().max(1) as f64;
    let title = format!(
        "{}: {} of {}",
        plan.preset,
        Bytes(plan.ledger.total_bytes()).human(),
        Bytes(plan.ledger.budget_bytes).human()
    );
    text(body, LEFT, y + 4.0, &title, " font-weight=\"bold\"");
    y += 14.0;
    let mut x = LEFT;
    let parts = plan.ledger.lines.iter().zip(COLOURS.iter().cycle()).filter(|(line, _)| line.bytes > 0);
    for (line, colour) in parts.clone() {
        let width = BAR_WIDTH * line.bytes as f64 / total;
        rect(body, (x, y), (width, BAR_HEIGHT), colour);
        x += width;
    }
    y += BAR_HEIGHT + ROW;
    for (number, (line, colour)) in parts.enumerate() {
        let x = LEFT + if number % 2 == 0 { 0.0 } else { BAR_WIDTH / 2.0 };
        rect(body, (x, y - 10.0), (11.0, 11.0), colour);
        text(body, x + 18.0, y, &format!("{}: {}", line.name, Bytes(line.bytes).human()), "");
        if number % 2 == 1 {
            y += ROW;
        }
    }
    y + 2.0 * ROW
}

// Writing to a String cannot fail.
fn rect(body: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
    let _ = writeln!(
        body,
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{colour}\"/>"
    );
}

fn text(body: &mut String, x: f64, y: f64, text: &str, style: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(body, "<text x=\"{x:.2}\" y=\"{y:.2}\"{style}>{text}</text>");
}
