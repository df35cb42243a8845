//! The operations of the HTTP listeners: one table of methods and paths.

use std::sync::LazyLock;

use http::{Method, StatusCode};

use super::problem::Problem;

/// What a method does on a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Operation {
    Check,
    CheckPost,
    CheckBatch,
    Remaining,
    Reset,
    PolicyCheck,
    PolicyCheckBatch,
    Explain,
    OpenApi,
    Health,
    Liveness,
    Readiness,
    Info,
    Prometheus,
    GetPolicy,
    PutPolicy,
    DeletePolicy,
    CheckPolicy,
    ReloadPolicy,
    PolicyHistory,
    PushedPolicy,
    RollBackPolicy,
    ListTiers,
    GetTier,
    PutTier,
    DeleteTier,
}

/// Who an operation is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Audience {
    /// Clients of the API.
    Clients,
    /// Probes: on every listener.
    Probes,
    /// Operators who look.
    Readers,
    /// Operators who may change something: `/admin`.
    Admins,
}

impl Operation {
    pub(super) const fn audience(self) -> Audience {
        match self {
            Self::Check
            | Self::CheckPost
            | Self::CheckBatch
            | Self::Remaining
            | Self::Reset
            | Self::PolicyCheck
            | Self::PolicyCheckBatch
            | Self::Explain
            | Self::OpenApi => Audience::Clients,
            Self::Health | Self::Liveness | Self::Readiness => Audience::Probes,
            Self::Info | Self::Prometheus => Audience::Readers,
            Self::GetPolicy
            | Self::PutPolicy
            | Self::DeletePolicy
            | Self::CheckPolicy
            | Self::ReloadPolicy
            | Self::PolicyHistory
            | Self::PushedPolicy
            | Self::RollBackPolicy
            | Self::ListTiers
            | Self::GetTier
            | Self::PutTier
            | Self::DeleteTier => Audience::Admins,
        }
    }
}

/// All operations. The OpenAPI document lists them in this order.
pub(super) const ROUTES: [(Method, &str, Operation); 26] = [
    (Method::GET, "/api/v1/rate-limit/check", Operation::Check),
    (Method::POST, "/api/v1/rate-limit/check", Operation::CheckPost),
    (Method::POST, "/api/v1/rate-limit/check/batch", Operation::CheckBatch),
    (Method::GET, "/api/v1/rate-limit/remaining", Operation::Remaining),
    (Method::DELETE, "/api/v1/rate-limit/reset", Operation::Reset),
    (Method::POST, "/api/v1/check", Operation::PolicyCheck),
    (Method::POST, "/api/v1/check/batch", Operation::PolicyCheckBatch),
    (Method::POST, "/api/v1/explain", Operation::Explain),
    (Method::GET, "/openapi.json", Operation::OpenApi),
    (Method::GET, "/actuator/health", Operation::Health),
    (Method::GET, "/actuator/health/liveness", Operation::Liveness),
    (Method::GET, "/actuator/health/readiness", Operation::Readiness),
    (Method::GET, "/actuator/info", Operation::Info),
    (Method::GET, "/actuator/prometheus", Operation::Prometheus),
    (Method::GET, "/admin/policy", Operation::GetPolicy),
    (Method::PUT, "/admin/policy", Operation::PutPolicy),
    (Method::DELETE, "/admin/policy", Operation::DeletePolicy),
    (Method::POST, "/admin/policy/check", Operation::CheckPolicy),
    (Method::POST, "/admin/policy/reload", Operation::ReloadPolicy),
    (Method::GET, "/admin/policy/history", Operation::PolicyHistory),
    (Method::GET, "/admin/policy/history/{number}", Operation::PushedPolicy),
    (Method::POST, "/admin/policy/rollback/{number}", Operation::RollBackPolicy),
    (Method::GET, "/admin/tiers", Operation::ListTiers),
    (Method::GET, "/admin/tiers/{family}/{member}", Operation::GetTier),
    (Method::PUT, "/admin/tiers/{family}/{member}", Operation::PutTier),
    (Method::DELETE, "/admin/tiers/{family}/{member}", Operation::DeleteTier),
];

/// The methods of a path.
#[derive(Default)]
struct Methods {
    operations: Vec<(Method, Operation)>,
    /// The value of `Allow`.
    allow: String,
}

static PATHS: LazyLock<matchit::Router<Methods>> = LazyLock::new(|| {
    let mut paths: Vec<(&str, Methods)> = Vec::new();
    for (method, path, operation) in ROUTES {
        let known = paths.iter().position(|(known, _)| *known == path);
        let place = known.unwrap_or_else(|| {
            paths.push((path, Methods::default()));
            paths.len() - 1
        });
        paths[place].1.operations.push((method, operation));
    }
    let mut router = matchit::Router::new();
    for (path, mut methods) in paths {
        let mut names: Vec<_> = methods.operations.iter().map(|(method, _)| method.as_str()).collect();
        if methods.operations.iter().any(|(_, operation)| operation.answers_head()) {
            names.push("HEAD");
        }
        methods.allow = names.join(", ");
        // The table has no two paths that match the same request: a test routes every one of them.
        let _ = router.insert(path, methods);
    }
    router
});

impl Operation {
    /// Whether `HEAD` is answered as `GET`, without the body. A check by `HEAD` would take permits.
    const fn answers_head(self) -> bool {
        matches!(self.audience(), Audience::Probes | Audience::Readers) || matches!(self, Self::OpenApi)
    }
}

/// An operation that a request asks for, and the variable parts of its path, as sent.
pub(super) struct Routed<'p> {
    pub(super) operation: Operation,
    parameters: matchit::Params<'static, 'p>,
}

impl<'p> Routed<'p> {
    /// A variable part of the path.
    pub(super) fn parameter(&self, name: &str) -> &'p str {
        self.parameters.get(name).unwrap_or_default()
    }
}

/// Finds the operation for a method and a path.
pub(super) fn route<'p>(method: &Method, path: &'p str) -> Result<Routed<'p>, Problem> {
    let Ok(found) = PATHS.at(path) else {
        return Err(Problem::new(
            StatusCode::NOT_FOUND,
            "no such path; GET /openapi.json on the API port lists all paths",
        ));
    };
    let operations = &found.value.operations;
    let is_asked = |(known, operation): &&(Method, Operation)| {
        known == method || (*method == Method::HEAD && operation.answers_head())
    };
    match operations.iter().find(is_asked) {
        Some((_, operation)) => Ok(Routed { operation: *operation, parameters: found.params }),
        None => Err(Problem::method(&found.value.allow)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_routed_by_its_own_method_and_path() {
        for (method, path, operation) in ROUTES {
            let path =
                path.replace("{number}", "7").replace("{family}", "users").replace("{member}", "a%2Fb");
            let routed = route(&method, &path).unwrap_or_else(|_| panic!("{method} {path} is not routed"));
            assert_eq!(routed.operation, operation, "{method} {path}");
        }
        assert_eq!(
            route(&Method::GET, "/admin/tiers/users/a%2Fb").map(|it| it.parameter("member")).ok(),
            Some("a%2Fb")
        );
    }

    #[test]
    fn unknown_paths_are_404_and_unknown_methods_405() {
        let status =
            |method: Method, path| route(&method, path).err().map(|problem| problem.status().as_u16());
        assert_eq!(status(Method::GET, "/nowhere"), Some(404));
        assert_eq!(status(Method::GET, "/api/v1/check/"), Some(404));
        assert_eq!(status(Method::PATCH, "/admin/policy"), Some(405));
        assert_eq!(status(Method::HEAD, "/api/v1/rate-limit/check"), Some(405), "it would take permits");
        assert_eq!(status(Method::HEAD, "/actuator/health"), None);
    }
}
