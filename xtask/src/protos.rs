//! Generates the Rust types of the protocol buffers, so that a build needs no compiler for them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use prost::Message;
use protox::Compiler;

/// The protocol buffers, below `crates/tollgate-server`.
const SOURCES: &str = "proto";
/// The service; it imports the rest.
const SERVICE: &str = "envoy/service/ratelimit/v3/rls.proto";
/// The generated files, below `crates/tollgate-server`.
const GENERATED: &str = "src/doors/rls/proto";
/// The descriptions of the types, which clients ask for by gRPC reflection.
const DESCRIPTORS: &str = "descriptors.bin";

/// Writes the generated files.
pub(crate) fn write(root: &Path) -> Result<()> {
    let folder = server(root).join(GENERATED);
    fs::create_dir_all(&folder)?;
    for (name, bytes) in generate(root)? {
        fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}

/// The generated files by name.
fn generate(root: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut compiler = Compiler::new([server(root).join(SOURCES)])?;
    compiler.include_imports(true).open_file(SERVICE)?;
    let mut files =
        BTreeMap::from([(DESCRIPTORS.to_owned(), compiler.file_descriptor_set().encode_to_vec())]);
    // With their comments.
    let described = compiler.include_source_info(true).file_descriptor_set();
    let folder = tempfile::tempdir()?;
    prost_build::Config::new().out_dir(folder.path()).compile_fds(described)?;
    for entry in fs::read_dir(folder.path())? {
        let entry = entry?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?);
    }
    Ok(files)
}

fn server(root: &Path) -> PathBuf {
    root.join("crates/tollgate-server")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_files_are_those_that_the_protocol_buffers_generate() {
        let root = crate::root().expect("the workspace has a root");
        let folder = server(&root).join(GENERATED);
        for (name, bytes) in generate(&root).expect("the protocol buffers compile") {
            let committed = fs::read(folder.join(&name)).unwrap_or_default();
            assert!(committed == bytes, "{name} is out of date: run `cargo xtask protos`");
        }
    }
}
