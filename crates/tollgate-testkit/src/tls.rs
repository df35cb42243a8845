//! Keys and certificates for one test: an authority, two servers and a client.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use tempfile::TempDir;

/// PEM files in a temporary directory, made for one test. They go with the last clone of this, and a server that uses
/// them keeps one.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    directory: Arc<TempDir>,
}

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct CertificateFiles {
    /// The certificate, as PEM.
    pub certificate: PathBuf,
    /// Its private key, as PEM.
    pub key: PathBuf,
}

impl TlsFiles {
    /// Makes an authority of its own and what it signs.
    ///
    /// # Panics
    /// If the files cannot be written.
    pub fn generate() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let authority = authority(directory.path());
        let server = ExtendedKeyUsagePurpose::ServerAuth;
        sign(&authority, directory.path(), "server", &["localhost", "127.0.0.1"], server.clone());
        sign(&authority, directory.path(), "wrong", &["wrong.example"], server);
        sign(
            &authority,
            directory.path(),
            "client",
            &["client.example"],
            ExtendedKeyUsagePurpose::ClientAuth,
        );
        Self { directory: Arc::new(directory) }
    }

    /// The certificate of the authority that has signed the others.
    pub fn authority(&self) -> PathBuf {
        self.directory.path().join("authority.pem")
    }

    /// The server `localhost`, also as 127.0.0.1.
    pub fn server(&self) -> CertificateFiles {
        self.named("server")
    }

    /// A server by the name `wrong.example`, which no test connects to by that name.
    pub fn wrong_server(&self) -> CertificateFiles {
        self.named("wrong")
    }

    /// The client `client.example`.
    pub fn client(&self) -> CertificateFiles {
        self.named("client")
    }

    fn named(&self, name: &str) -> CertificateFiles {
        let path = |end| self.directory.path().join(format!("{name}{end}"));
        CertificateFiles { certificate: path(".pem"), key: path(".key.pem") }
    }
}

fn authority(directory: &Path) -> Issuer<'static, KeyPair> {
    let mut parameters = parameters(&[], "Tollgate test authority");
    parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().expect("a key can be made");
    let certificate = parameters.self_signed(&key).expect("the authority can sign itself");
    write(directory.join("authority.pem"), &certificate.pem());
    Issuer::new(parameters, key)
}

fn sign(
    authority: &Issuer<'_, KeyPair>,
    directory: &Path,
    file: &str,
    names: &[&str],
    purpose: ExtendedKeyUsagePurpose,
) {
    let mut parameters = parameters(names, names[0]);
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    parameters.extended_key_usages = vec![purpose];
    parameters.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate().expect("a key can be made");
    let certificate = parameters.signed_by(&key, authority).expect("the authority can sign");
    write(directory.join(format!("{file}.pem")), &certificate.pem());
    write(directory.join(format!("{file}.key.pem")), &key.serialize_pem());
}

/// The authority and what it signs need different names: a certificate whose issuer has its own name counts as signed
/// by itself.
fn parameters(names: &[&str], common_name: &str) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    let mut parameters = CertificateParams::new(names).expect("the names are names or addresses");
    parameters.distinguished_name.push(DnType::CommonName, common_name);
    parameters
}

fn write(path: PathBuf, text: &str) {
    fs::write(path, text).expect("a file in the temporary directory can be written");
}
