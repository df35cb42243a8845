//! The fixture that starts the server.

use std::net::TcpStream;

use tollgate_e2e::Tollgate;

#[test]
fn server_answers_on_its_address_and_stops_with_the_fixture() {
    let server = Tollgate::start("");
    assert_eq!(server.get("/api/v1/rate-limit/check?key=user:1").json()["remaining"], 99);
    assert_eq!(server.admin, server.address);
    let address = server.address;
    drop(server);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn admin_address_is_read_from_the_banner() {
    let server = Tollgate::start("admin: { listen: 127.0.0.1:0 }\n");
    assert_ne!(server.admin, server.address);
    assert_eq!(tollgate_e2e::http::get(server.admin, "/actuator/health").status, 200);
}

#[test]
#[should_panic(expected = "lisen")]
fn server_that_cannot_start_fails_the_test_with_its_log() {
    Tollgate::start("lisen: 127.0.0.1:0\n");
}
