//! The web console: one page, which needs nothing from elsewhere.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::AppState;

const PAGE: &str = include_str!("../assets/console.html");
/// What a browser looks for beside a page that names no icon: a ring of experts, some of them firing.
const ICON: &str = concat!(
    r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" "##,
    r##"rx="7" fill="#16181d"/><g fill="none" stroke-width="3.4"><circle cx="16" cy="16" r="9.5" "##,
    r##"stroke="#4a4f59" stroke-dasharray="5 2.46"/><circle cx="16" cy="16" r="9.5" stroke="#ff9a62" "##,
    r##"stroke-dasharray="5 24.85"/></g></svg>"##,
);

/// The page's own script and style, and nothing else; no text becomes markup, and no other page may frame it.
const POLICY: &str = "default-src 'self' 'unsafe-inline'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; object-src 'none'; \
                      require-trusted-types-for 'script'";

/// Changes when the page does.
static PAGE_TAG: LazyLock<String> = LazyLock::new(|| {
    let mut hasher = DefaultHasher::new();
    PAGE.hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
});

/// `/`, and its icon.
pub(crate) fn routes() -> Router<AppState> {
    Router::new().route("/", get(page)).route("/favicon.ico", get(icon))
}

/// The page, unless the browser has it. It is asked for each time, so that a new server brings its own page.
async fn page(headers: HeaderMap) -> Response {
    let tag = PAGE_TAG.as_str();
    let common = [
        (ETAG, tag),
        (CACHE_CONTROL, "no-cache"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    let known = headers.get(IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
    if known.is_some_and(|tags| tags.split(',').any(|one| one.trim().trim_start_matches("W/") == tag)) {
        return (StatusCode::NOT_MODIFIED, common).into_response();
    }
    (common, [(CONTENT_TYPE, "text/html; charset=utf-8")], PAGE).into_response()
}

async fn icon() -> impl IntoResponse {
    ([(CONTENT_TYPE, "image/svg+xml"), (CACHE_CONTROL, "max-age=86400")], ICON)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_page_comes_once_and_then_only_if_it_has_changed() {
        let first = page(HeaderMap::new()).await;
        assert_eq!(first.status(), StatusCode::OK);
        let tag = first.headers()[ETAG].clone();
        for (known, status) in [
            (tag.to_str().unwrap().to_owned(), StatusCode::NOT_MODIFIED),
            (format!("\"x\", W/{}", tag.to_str().unwrap()), StatusCode::NOT_MODIFIED),
            ("\"x\"".to_owned(), StatusCode::OK),
        ] {
            let headers = HeaderMap::from_iter([(IF_NONE_MATCH, known.parse().unwrap())]);
            let answer = page(headers).await;
            assert_eq!(answer.status(), status, "{known}");
            assert!(answer.headers().contains_key(CONTENT_SECURITY_POLICY));
        }
    }

    /// What the policy forbids the page to use, so that a browser need not find out.
    #[test]
    fn the_page_asks_nobody_else() {
        for foreign in ["src=\"http", "href=\"http", "url(http", "@import"] {
            assert!(!PAGE.contains(foreign), "{foreign}");
        }
    }
}
