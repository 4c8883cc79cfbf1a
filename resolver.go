package edgelimit

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/edgelimit/caddy-edgelimit/internal/chain"
)

// This is the only file that reads identity headers; a test over the source
// fails the build if another one does.

// Headers that are read or written by name.
const (
	headerForwardedFor   = "X-Forwarded-For"
	headerForwarded      = "Forwarded"
	headerForwardedProto = "X-Forwarded-Proto"
	headerForwardedHost  = "X-Forwarded-Host"
	headerClientIP       = "X-Client-Ip"
)

// identityHeaders are the headers by which upstreams are commonly told who the
// client is. All are removed, read or not: an upstream must never be able to
// pick the one that the caller wrote.
var identityHeaders = []string{
	headerForwardedFor, headerForwarded, "X-Real-IP", "True-Client-IP",
	"CF-Connecting-IP", "CF-Connecting-IPv6", headerClientIP, "Client-IP",
	"X-Cluster-Client-IP", "Fastly-Client-IP", "Fly-Client-IP",
	"X-Original-Forwarded-For", "Forwarded-For", "X-Envoy-External-Address",
}

// rareIdentityHeaders are read by somebody as the client's address, and are not
// always removed: some configuration may read one.
var rareIdentityHeaders = []string{
	"X-Forwarded", "X-Client", "X-Remote-IP", "X-Remote-Addr", "Remote-Addr", "X-Originating-IP", "X-Host-IP",
	"X-ProxyUser-IP", "Proxy-Client-IP", "WL-Proxy-Client-IP", "X-Azure-ClientIP", "X-Azure-SocketIP",
	"X-Appengine-User-IP", "X-Vercel-Forwarded-For", "X-NF-Client-Connection-IP", "DO-Connecting-IP",
	"X-Connecting-IP", "Ali-CDN-Real-IP", "Incap-Client-IP", "X-Sucuri-ClientIP", "X-Bluecoat-Via", "Akamai-Client-IP",
}

// source is why a client is believed.
type source uint8

const (
	sourceConnection source = iota
	sourceServer
	sourceTrustedProxies
	sourceHops
	sourceSingleValue
	sourceProof
	sourceUnresolved
	sources
)

var sourceNames = [sources]string{
	"connection", "server", "trusted_proxies", "hops", "single_value", "proof", "unresolved",
}

func (s source) String() string { return sourceNames[s] }

// reason is why a client is unresolved, or why a resolved one deserves a look.
type reason uint8

const (
	reasonNone reason = iota
	// unresolved:
	reasonMissingHeader
	reasonMalformed
	reasonNotSingle
	reasonNoAddress
	// resolved, but look here:
	reasonShortChain
	reasonUnverifiedHop
	reasonUntrustedHeader
	reasons
)

var reasonNames = [reasons]string{
	"", "missing_header", "malformed", "not_single", "no_address",
	"short_chain", "unverified_hop", "untrusted_header",
}

func (r reason) String() string { return reasonNames[r] }

// resolution answers who the client of a request is.
type resolution struct {
	client netip.Addr // canonical; the zero Addr when unresolved
	lines  []string   // the chain as it came, for the probe
	passed uint8      // entries passed over on the way to the client, at most maxHops
	source source
	reason reason

	onUnix      bool // the peer is on a Unix socket
	peerTrusted bool // the peer may write X-Forwarded-*
	unread      bool // the chain goes on to the left of what was read
	proven      bool // a valid proof was presented
	unverified  bool // entries were passed over without being verified
}

func (res *resolution) resolved() bool { return res.client.IsValid() }

// resolve finds the client of r.
func (c *Client) resolve(r *http.Request, vars map[string]any) (res resolution) {
	c.resolveInto(&res, r, vars, localAddr(r))
	return res
}

// resolveInto finds the client of r, which came in at local. It reads headers and the connection and changes
// nothing. The cases, in order:
//
//   - A valid proof: the one address in the proof's client header.
//   - No trust in the peer: the peer itself. No chain is read.
//   - Trust by the server's own trusted_proxies, where the block names none: the
//     entry that a strict server found, else the rightmost.
//   - single_value: the header's only address.
//   - hops n: the n-th entry from the right.
//   - Trusted ranges: the first entry from the right that is no trusted proxy.
//
// An entry that must be read and is no address leaves the client unresolved, as
// does a header that a trusted peer left out.
func (c *Client) resolveInto(res *resolution, r *http.Request, vars map[string]any, local net.Addr) {
	peer, isUnix := peerOf(r.RemoteAddr, local)
	res.onUnix, res.lines = isUnix, r.Header[c.Header]
	byServer := false
	switch {
	case c.Connection:
	case len(c.trusted) > 0 || c.TrustedProxiesUnix:
		res.peerTrusted = isUnix && c.TrustedProxiesUnix || peer.IsValid() && c.trusts(r, peer)
	default:
		byServer, _ = vars[caddyhttp.TrustedProxyVarKey].(bool)
		byServer = byServer && (!isUnix || r.RemoteAddr == "@") // another name is the peer's own choice
		res.peerTrusted = byServer
	}

	switch {
	case c.Proof != nil && c.Proof.presented(r.Header):
		c.Proof.client(r.Header, res)
	case !res.peerTrusted:
		c.connection(peer, res)
	case len(res.lines) == 0:
		res.unresolve(reasonMissingHeader)
	case byServer:
		c.server(r, vars, res)
	case c.SingleValue:
		c.singleValue(res)
	case c.Hops > 0:
		c.hops(r, res)
	default:
		c.walk(r, res)
	}
}

// setLines writes the chain into a header, for a request that is only explained.
func (c *Client) setLines(h http.Header, lines []string) {
	if len(lines) > 0 {
		h[c.Header] = lines
	}
}

func (res *resolution) resolve(client netip.Addr, by source, remark reason) {
	res.client, res.source, res.reason = client, by, remark
}

func (res *resolution) unresolve(why reason) {
	res.client, res.source, res.reason = netip.Addr{}, sourceUnresolved, why
}

// peerOf reads the address of the connection. A peer on a Unix socket has none.
func peerOf(remoteAddr string, local net.Addr) (peer netip.Addr, isUnix bool) {
	if local != nil && strings.HasPrefix(local.Network(), "unix") {
		return netip.Addr{}, true
	}
	// that there is a port, else it would be none of net/http's
	colon := strings.LastIndexByte(remoteAddr, ':')
	if colon > 0 && (remoteAddr[colon-1] == ']' || strings.IndexByte(remoteAddr, ':') == colon) {
		peer, _ = chain.ParseAddr(remoteAddr)
	}
	return peer, false
}

// presented says whether the request carries a valid proof. A wrong, repeated or
// listed one is as no proof.
func (p *Proof) presented(h http.Header) bool {
	values := h[p.Header]
	return len(values) == 1 && p.proves(values[0])
}

// client reads the address that a proven sender states.
func (p *Proof) client(h http.Header, res *resolution) {
	res.proven = true
	values := h[p.clientHeader()]
	switch {
	case len(values) == 0:
		res.unresolve(reasonMissingHeader)
	case len(values) > 1 || strings.Contains(values[0], ","):
		res.unresolve(reasonNotSingle)
	default:
		if client, ok := chain.ParseAddr(values[0]); ok {
			res.resolve(client, sourceProof, reasonNone)
		} else {
			res.unresolve(reasonMalformed)
		}
	}
}

// connection takes the peer as the client. A chain from a private peer that is
// not trusted is how a whole site ends up in one bucket, so it is remarked on,
// unless the configuration says that nothing stands in front.
func (c *Client) connection(peer netip.Addr, res *resolution) {
	if !peer.IsValid() {
		res.unresolve(reasonNoAddress)
		return
	}
	remark := reasonNone
	if len(res.lines) > 0 && !c.Connection && privateRange(peer).IsValid() {
		remark = reasonUntrustedHeader
	}
	res.unread = len(res.lines) > 0
	res.resolve(peer, sourceConnection, remark)
}

// server follows Caddy's own trusted_proxies. Their ranges cannot be read by a
// plugin, but what a strict server found in X-Forwarded-For can: the entry to
// stop at is the one that equals its client_ip; if that is the peer, all that
// Caddy could read were trusted. Caddy skips what it cannot parse, so the walk
// ends earlier at such an entry. A server that is not strict
// takes the leftmost entry, which is the caller's: the rightmost is taken here.
func (c *Client) server(r *http.Request, vars map[string]any, res *resolution) {
	found, _ := vars[caddyhttp.ClientIPVarKey].(string)
	server, _ := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	strict := server != nil && server.TrustedProxiesStrict > 0 && c.Header == headerForwardedFor &&
		len(server.ClientIPHeaders) == 1 && http.CanonicalHeaderKey(server.ClientIPHeaders[0]) == headerForwardedFor

	allTrusted := strict && found == hostOf(r.RemoteAddr)
	if strict {
		entries := c.entries(res.lines)
		for n := range maxHops {
			entry, ok := entries.Next()
			if !ok {
				break
			}
			if parsed, readable := caddyParses(entry); !readable || !allTrusted && parsed == found {
				res.passed = uint8(n)
				c.takeEntry(entry, &entries, res, sourceServer, reasonNone)
				return
			}
		}
	}
	c.rightmost(res, sourceServer, reasonNone)
}

// caddyParses reads an entry as Caddy's server does: what it says of it here,
// and whether it reads it at all.
func caddyParses(entry string) (string, bool) {
	host, _, err := net.SplitHostPort(entry)
	if err != nil {
		host = entry
	}
	host, _, _ = strings.Cut(strings.TrimSpace(host), "%")
	addr, err := netip.ParseAddr(host)
	return addr.String(), err == nil
}

// hostOf is an address without port and zone, as Caddy writes the peer.
func hostOf(remoteAddr string) string {
	addrPort, err := netip.ParseAddrPort(remoteAddr)
	if err != nil {
		return remoteAddr // "@", a Unix socket
	}
	return addrPort.Addr().WithZone("").String()
}

// singleValue accepts a chain of exactly one address: what a proxy writes that
// does not append but rewrites.
func (c *Client) singleValue(res *resolution) {
	entries := c.entries(res.lines)
	entry, _ := entries.Next()
	if _, more := entries.Next(); more {
		res.unread = true
		res.unresolve(reasonNotSingle)
		return
	}
	c.takeEntry(entry, &entries, res, sourceSingleValue, reasonNone)
}

// hops takes the n-th entry from the right. Each entry passed over must be a
// trusted proxy, else it is the client itself; unverified hops are counted and
// not read.
func (c *Client) hops(r *http.Request, res *resolution) {
	if c.shorterThan(c.Hops, res.lines) {
		c.rightmost(res, sourceHops, reasonShortChain)
		return
	}
	entries := c.entries(res.lines)
	for n := 1; ; n++ {
		entry, _ := entries.Next()
		if n == c.Hops {
			res.unverified = c.Unverified && n > 1
			c.takeEntry(entry, &entries, res, sourceHops, reasonNone)
			return
		}
		if !c.Unverified {
			if addr, ok := c.parse(entry); !ok || !c.trusts(r, addr) {
				c.take(addr, ok, &entries, res, sourceHops, reasonUnverifiedHop)
				return
			}
		}
		res.passed++
	}
}

func (c *Client) shorterThan(n int, lines []string) bool {
	entries := c.entries(lines)
	for range n {
		if _, ok := entries.Next(); !ok {
			return true
		}
	}
	return false
}

// walk passes the trusted proxies from the right: the first other entry is the
// client. If all are trusted, the rightmost: what the nearest proxy saw.
func (c *Client) walk(r *http.Request, res *resolution) {
	entries := c.entries(res.lines)
	for range maxHops {
		entry, ok := entries.Next()
		if !ok {
			break
		}
		addr, ok := c.parse(entry)
		if !ok || !c.trusts(r, addr) {
			c.take(addr, ok, &entries, res, sourceTrustedProxies, reasonNone)
			return
		}
		res.passed++
	}
	res.passed = 0
	c.rightmost(res, sourceTrustedProxies, reasonNone)
}

// rightmost makes the entry that the peer wrote the client.
func (c *Client) rightmost(res *resolution, by source, remark reason) {
	entries := c.entries(res.lines)
	entry, _ := entries.Next()
	c.takeEntry(entry, &entries, res, by, remark)
}

// takeEntry makes entry the client, or leaves it unresolved if that is no
// address. What rest still holds was written further left.
func (c *Client) takeEntry(entry string, rest *chain.Reader, res *resolution, by source, remark reason) {
	addr, ok := c.parse(entry)
	c.take(addr, ok, rest, res, by, remark)
}

// take is takeEntry for an entry that was parsed already.
func (c *Client) take(addr netip.Addr, ok bool, rest *chain.Reader, res *resolution, by source, remark reason) {
	_, res.unread = rest.Next()
	if ok {
		res.resolve(addr, by, remark)
	} else {
		res.unresolve(reasonMalformed)
	}
}

// explain lists the chain, from left to right, with who wrote each entry and
// whether it was read. Of a longer chain only the right end is shown.
func (c *Client) explain(res *resolution) []probedEntry {
	var explained []probedEntry
	entries := c.entries(res.lines)
	writer, verified := "caller", res.peerTrusted && !res.proven
	if verified {
		writer = "peer"
	}
	for n := range maxHops {
		entry, ok := entries.Next()
		if !ok {
			break
		}
		read := verified && n <= int(res.passed)
		explained = append(explained, probedEntry{Entry: strings.Trim(entry, " \t"), Writer: writer, Read: read})
		switch {
		case !read || n == int(res.passed):
			writer, verified = "caller", false
		case res.unverified:
			writer = "unverified"
		default:
			addr, _ := c.parse(entry)
			writer = addr.String()
		}
	}
	slices.Reverse(explained)
	return explained
}

// chainKind is the grammar of the header that is read.
type chainKind bool

const (
	listChain      chainKind = false // comma-separated addresses
	forwardedChain chainKind = true  // RFC 7239
)

func chainKindOf(header string) chainKind { return header == headerForwarded }

func (c *Client) entries(lines []string) chain.Reader {
	if c.reads == forwardedChain {
		return chain.FromForwarded(lines)
	}
	return chain.FromList(lines)
}

func (c *Client) parse(entry string) (netip.Addr, bool) {
	if c.reads == forwardedChain {
		node, ok := chain.ForwardedFor(entry)
		if !ok {
			return netip.Addr{}, false
		}
		return chain.ParseNode(node)
	}
	return chain.ParseAddr(entry)
}

// privateRanges are where reverse proxies of one's own usually stand.
var privateRanges = []netip.Prefix{
	netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"),
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.168.0.0/16"), netip.MustParsePrefix("fc00::/7"),
	netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("100.64.0.0/10"),
}

// privateRange is the private or loopback range of addr, or the zero Prefix.
func privateRange(addr netip.Addr) netip.Prefix {
	for _, prefix := range privateRanges {
		if prefix.Contains(addr) {
			return prefix
		}
	}
	return netip.Prefix{}
}
