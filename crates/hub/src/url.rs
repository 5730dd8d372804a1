//! Addresses: as much of them as a client of one hub needs.

use ureq::http::Uri;

use crate::error::HubError;

/// An absolute address of http or https.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Url {
    uri: Uri,
}

impl Url {
    /// Reads a hub's address.
    pub fn endpoint(address: &str) -> Result<Self, HubError> {
        let bad = |what| HubError::Endpoint { address: address.to_owned(), what };
        let url = Self::absolute(address.trim_end_matches('/'))
            .ok_or_else(|| bad("it is none of http or https"))?;
        if url.uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(bad("it holds a name or a password; put a token into HF_TOKEN"));
        }
        Ok(url)
    }

    fn absolute(address: &str) -> Option<Self> {
        let uri: Uri = address.parse().ok()?;
        let fine = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
        fine.then_some(Self { uri })
    }

    /// The address of `path` below this one; what is in it is escaped already.
    pub fn below(&self, path: &str) -> Self {
        let text = format!("{}/{path}", self.to_string().trim_end_matches('/'));
        Self { uri: text.parse().expect("an address and an escaped path are an address") }
    }

    /// Where an answer of this address leads.
    pub fn join(&self, location: &str) -> Option<Self> {
        let whole = match location {
            _ if location.contains("://") => location.to_owned(),
            _ if location.starts_with("//") => format!("{}:{location}", self.scheme()),
            _ if location.starts_with('/') => format!("{}://{}{location}", self.scheme(), self.authority()),
            _ => {
                let folder = self.uri.path().rsplit_once('/').map_or("", |(folder, _)| folder);
                format!("{}://{}{folder}/{location}", self.scheme(), self.authority())
            }
        };
        Self::absolute(&whole)
    }

    /// Whether both are of the same scheme, host and port: who is trusted with one is with the other.
    pub fn same_origin(&self, other: &Self) -> bool {
        let port = |url: &Self| url.uri.port_u16().unwrap_or(if url.is_encrypted() { 443 } else { 80 });
        let host = |url: &Self| url.host().to_ascii_lowercase();
        self.scheme() == other.scheme() && host(self) == host(other) && port(self) == port(other)
    }

    pub fn is_encrypted(&self) -> bool {
        self.scheme() == "https"
    }

    pub fn host(&self) -> &str {
        self.uri.host().unwrap_or_default()
    }

    pub fn uri(&self) -> &Uri {
        &self.uri
    }

    /// Without what follows the path, where signatures are.
    pub fn public(&self) -> String {
        format!("{}://{}{}", self.scheme(), self.authority(), self.uri.path())
    }

    fn scheme(&self) -> &str {
        self.uri.scheme_str().unwrap_or_default()
    }

    fn authority(&self) -> &str {
        self.uri.authority().map_or("", |authority| authority.as_str())
    }
}

/// A text as a part of a path, its slashes kept as they are.
pub(crate) fn path(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                escaped.push(char::from(byte));
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

/// A text as one part of a path.
pub(crate) fn segment(text: &str) -> String {
    path(text).replace('/', "%2F")
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.uri)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_escaped_and_locations_joined() {
        let hub = Url::endpoint("https://hub.example/mirror/").expect("an address");
        let file = hub.below(&format!("a/{}/{}?blobs=true", segment("refs/pr/1"), path("b/x y#?.json")));
        let public = "https://hub.example/mirror/a/refs%2Fpr%2F1/b/x%20y%23%3F.json";
        assert_eq!((file.to_string(), file.public()), (format!("{public}?blobs=true"), public.to_owned()));
        let leads = |to: &str| file.join(to).map(|url| url.to_string());
        assert_eq!(leads("/c?d=1").as_deref(), Some("https://hub.example/c?d=1"));
        assert_eq!(leads("e").as_deref(), Some("https://hub.example/mirror/a/refs%2Fpr%2F1/b/e"));
        assert_eq!(leads("//other/f").as_deref(), Some("https://other/f"));
        assert_eq!(leads("http://other:8/g").as_deref(), Some("http://other:8/g"));
        assert_eq!(leads("file:///etc/passwd"), None);
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let url = |s: &str| Url::absolute(s).expect("an address");
        let hub = url("https://hub.example/x");
        assert!(hub.same_origin(&url("https://HUB.example:443/y?z")));
        for other in ["http://hub.example/x", "https://hub.example:8443/x", "https://cdn.hub.example/x"] {
            assert!(!hub.same_origin(&url(other)), "{other}");
        }
        for wrong in ["", "hub.example", "ftp://hub.example", "https://user:secret@hub.example"] {
            assert!(Url::endpoint(wrong).is_err(), "{wrong}");
        }
    }
}
