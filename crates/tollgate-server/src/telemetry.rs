//! Log lines: pretty on a terminal, JSON otherwise.

use std::io::{self, IsTerminal, Write};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::{Config, LogFormat};
use crate::escape::escaped;

/// Starts logging to standard error, once for the process.
pub(crate) fn init(config: &Config) {
    let is_terminal = io::stderr().is_terminal();
    let pretty = match config.log_format {
        LogFormat::Auto => is_terminal,
        LogFormat::Pretty => true,
        LogFormat::Json => false,
    };
    let filter = EnvFilter::builder().parse_lossy(&config.log_level);
    let colours = pretty && is_terminal;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colours)
        .with_writer(Lines { colours })
        .with_target(false);
    // A second start, as in tests, keeps the first one's log.
    let _ = if pretty { lines.try_init() } else { lines.json().flatten_event(true).try_init() };
}

/// Writes every event as one line of standard error, whatever characters it holds.
#[derive(Clone, Copy)]
struct Lines {
    /// Whether the formatter writes colours, which are kept.
    colours: bool,
}

impl<'w> MakeWriter<'w> for Lines {
    type Writer = Self;

    fn make_writer(&'w self) -> Self {
        *self
    }
}

impl Write for Lines {
    /// Takes one event: the formatter hands over each of them whole.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let line = line(&text, self.colours);
        io::stderr().lock().write_all(line.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

fn line(text: &str, colours: bool) -> String {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let mut line = String::with_capacity(text.len() + 1);
    let mut rest = text;
    while let Some((before, colour, after)) = next_colour(rest).filter(|_| colours) {
        line += &escaped(before);
        line += colour;
        rest = after;
    }
    line += &escaped(rest);
    line.push('\n');
    line
}

/// The first colour code, `ESC [ 1 ; 31 m`, with the texts before and after it.
fn next_colour(text: &str) -> Option<(&str, &str, &str)> {
    let is_parameter = |byte: &u8| byte.is_ascii_digit() || *byte == b';';
    for (start, _) in text.match_indices("\x1b[") {
        let parameters = text.as_bytes()[start + 2..].iter().take_while(|byte| is_parameter(byte)).count();
        let end = start + 2 + parameters;
        if text.as_bytes().get(end) == Some(&b'm') {
            return Some((&text[..start], &text[start..=end], &text[end + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_and_only_the_formatters_colours_stay() {
        let event = "\x1b[2mnow\x1b[0m user:a\nfake \u{202e}\x1b[2J\n";
        assert_eq!(line(event, true), "\x1b[2mnow\x1b[0m user:a\\nfake \\u202e\\u001b[2J\n");
        assert_eq!(line(event, false), "\\u001b[2mnow\\u001b[0m user:a\\nfake \\u202e\\u001b[2J\n");
    }
}
