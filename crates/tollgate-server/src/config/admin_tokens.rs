//! The tokens of `/admin`: a file with lines `NAME:TOKEN`, of which only names and digests are kept.

use std::path::Path;

use sha2::{Digest, Sha256};

/// Shorter tokens could be guessed.
const TOKEN_CHARS_MIN: usize = 16;
/// Names are shown in log lines, which should stay short.
const NAME_CHARS_MAX: usize = 64;

/// A token of `/admin`.
#[derive(Clone, Debug)]
pub struct AdminToken {
    /// The name that the audit log shows.
    pub name: String,
    /// SHA-256 of the token.
    pub digest: [u8; 32],
}

/// Reads a file of tokens. Empty lines and lines that begin with `#` are skipped. A name may have several tokens, so that one can be
/// replaced by another.
pub(super) fn read(path: &Path) -> Result<Vec<AdminToken>, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|why| format!("{shown} cannot be read: {why}"))?;
    let mut tokens = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        // The line itself is a secret, and is not shown.
        tokens.push(parse(line).map_err(|why| format!("{shown}:{number}: {why}"))?);
    }
    if tokens.is_empty() {
        return Err(format!("{shown} has no tokens; expected lines such as alice:TOKEN"));
    }
    Ok(tokens)
}

fn parse(line: &str) -> Result<AdminToken, String> {
    let (name, token) = line.split_once(':').ok_or("expected NAME:TOKEN, such as alice:TOKEN")?;
    let (name, token) = (name.trim(), token.trim());
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte);
    if name.is_empty() || name.len() > NAME_CHARS_MAX || !name.bytes().all(is_name) {
        return Err(format!(
            "a name has 1 to {NAME_CHARS_MAX} letters, digits and the characters . _ - @, and a colon behind it"
        ));
    }
    if token.len() < TOKEN_CHARS_MIN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!("a token has at least {TOKEN_CHARS_MIN} visible ASCII characters"));
    }
    Ok(AdminToken { name: name.to_owned(), digest: Sha256::digest(token).into() })
}
