//! The variables of the process that are settings.

use std::ffi::OsString;

use super::{ConfigError, ConfigErrors};

/// The process's variables that begin with `TOLLGATE_`, to be read by [`super::load`]. All of them must be UTF-8.
pub fn environment() -> Result<Vec<(String, String)>, ConfigErrors> {
    texts(std::env::vars_os())
}

fn texts(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Vec<(String, String)>, ConfigErrors> {
    let (mut texts, mut errors) = (Vec::new(), Vec::new());
    for (name, value) in variables {
        let Ok(name) = name.into_string() else { continue };
        if !name.starts_with("TOLLGATE_") {
            continue;
        }
        match value.into_string() {
            Ok(value) => texts.push((name, value)),
            // A path may be any bytes; it is not read from here.
            Err(_) if name == super::CONFIG_VARIABLE => {}
            Err(_) => errors.push(ConfigError::new(&name, None, &[], "the value is not UTF-8")),
        }
    }
    if errors.is_empty() { Ok(texts) } else { Err(ConfigErrors::new(errors)) }
}
