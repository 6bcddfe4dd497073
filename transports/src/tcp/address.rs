//! Addresses: what a text names, and which socket addresses that is.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

/// A `host:port`, not yet resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostPort {
    /// A name, an IPv4 address, or an IPv6 one (without its brackets, with its scope).
    pub(super) host: String,
    pub(super) port: u16,
}

impl HostPort {
    /// Parses `host:port`; an IPv6 address stands in brackets.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => rest.split_once("]:").ok_or("an IPv6 address is written as [ADDRESS]:PORT")?,
            None => text.rsplit_once(':').ok_or("the port is missing: write HOST:PORT")?,
        };
        if host.contains(':') && !text.starts_with('[') {
            return Err("an IPv6 address is written as [ADDRESS]:PORT".into());
        }
        if host.is_empty() {
            return Err("the host is missing: write HOST:PORT".into());
        }
        let port =
            port.parse().map_err(|_| format!("{port:?} is no port: write a number from 0 to 65535"))?;
        Ok(HostPort { host: host.into(), port })
    }

    /// The one socket address that it is, if nobody has to be asked for it.
    pub(super) fn literal(&self) -> Option<SocketAddr> {
        let text =
            if self.host.contains(':') { format!("[{}]:{}", self.host, self.port) } else { self.text() };
        text.parse().ok()
    }

    /// Asks the operating system; may block for as long as its name service does.
    pub(super) fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        if let Some(address) = self.literal() {
            return Ok(vec![address]);
        }
        let found: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        if found.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        }
        Ok(found)
    }

    /// The text that parses to it.
    pub(super) fn text(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// What peers are told: the advertised host, or the bound one; the bound port unless another is advertised.
pub(super) fn advertised(bound: SocketAddr, advertise: Option<&str>) -> Result<HostPort, String> {
    let Some(text) = advertise else {
        // Whoever listens on every interface is reached on this host's own; other hosts need `advertise`.
        let host = match bound.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.to_string(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.to_string(),
            // The scope is part of a link-local address.
            IpAddr::V6(_) => match bound {
                SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
                _ => bound.ip().to_string(),
            },
            IpAddr::V4(ip) => ip.to_string(),
        };
        return Ok(HostPort { host, port: bound.port() });
    };
    if let Ok(ip) = text.parse::<Ipv6Addr>() {
        return Ok(HostPort { host: ip.to_string(), port: bound.port() });
    }
    if text.contains(':') {
        let given = HostPort::parse(text)?;
        return Ok(HostPort { port: if given.port == 0 { bound.port() } else { given.port }, ..given });
    }
    Ok(HostPort { host: text.into(), port: bound.port() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> HostPort {
        HostPort::parse(text).unwrap()
    }

    #[test]
    fn every_form_of_an_address_parses_and_prints_back() {
        for text in
            ["127.0.0.1:80", "[::1]:4100", "localhost:0", "[fe80::1%2]:9", "[2001:db8:1:2:3:4:5:6]:65535"]
        {
            assert_eq!(parse(text).text(), text);
        }
        assert_eq!(parse("[::1]:7").literal(), Some("[::1]:7".parse().unwrap()));
        assert_eq!(parse("[fe80::1%2]:9").literal().map(|a| a.port()), Some(9));
        assert_eq!(parse("localhost:7").literal(), None);
    }

    #[test]
    fn a_malformed_address_says_what_to_write() {
        for (text, hint) in [
            ("::1:4100", "[ADDRESS]:PORT"),
            ("[::1]4100", "[ADDRESS]:PORT"),
            ("localhost", "HOST:PORT"),
            (":80", "HOST:PORT"),
            ("a:99999", "65535"),
        ] {
            let error = HostPort::parse(text).unwrap_err();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }

    #[test]
    fn the_advertised_address_is_the_bound_one_unless_told_otherwise() {
        let text = |bound: &str, told: Option<&str>| advertised(bound.parse().unwrap(), told).unwrap().text();
        assert_eq!(text("127.0.0.1:41", None), "127.0.0.1:41");
        assert_eq!(text("0.0.0.0:41", None), "127.0.0.1:41");
        assert_eq!(text("[::]:41", None), "[::1]:41");
        assert_eq!(text("[fe80::1%3]:41", None), "[fe80::1%3]:41");
        assert_eq!(text("0.0.0.0:41", Some("node-7")), "node-7:41");
        assert_eq!(text("0.0.0.0:41", Some("node-7:80")), "node-7:80");
        assert_eq!(text("[::]:41", Some("2001:db8::1")), "[2001:db8::1]:41");
    }
}
