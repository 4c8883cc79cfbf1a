package edgelimit

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Client says how the client of a request is found: from the connection, and
// from what a trusted writer put in a header, never from what the caller wrote.
//
// The rule behind all of it: never move left of an entry whose writer is not
// verified. When unsure, stay right. Over-grouping is a support ticket;
// over-trust is a limiter that limits nobody.
type Client struct {
	// Nothing stands in front of this server: the client is whoever opened the
	// connection, and not even the server's own `trusted_proxies` count.
	// Excludes all other fields. Default: false.
	Connection bool `json:"connection,omitempty"`

	// The proxies whose headers are believed, from any module of the
	// `http.ip_sources` namespace. Default: none. Without any, a peer that the
	// server's own `trusted_proxies` name is believed as far as that is safe.
	TrustedProxiesRaw []json.RawMessage `json:"trusted_proxies,omitempty" caddy:"namespace=http.ip_sources inline_key=source"`

	// Peers on Unix sockets are trusted proxies. Default: false.
	TrustedProxiesUnix bool `json:"trusted_proxies_unix,omitempty"`

	// The header that trusted proxies append to. `Forwarded` is read as
	// RFC 7239, any other as a comma-separated list. Default: `X-Forwarded-For`.
	Header string `json:"header,omitempty"`

	// The client is the n-th entry from the right, and every entry passed over
	// must be a trusted proxy itself. From 1 to 64. Default: walk from the right
	// past all trusted proxies.
	//
	// Too many hops is the dangerous direction: the count then reaches into what
	// the caller wrote. Too few groups clients behind a proxy's address. When
	// the number is not certain, choose the lower one.
	Hops int `json:"hops,omitempty"`

	// Count the hops without reading the entries passed over. Whoever reaches an
	// inner proxy directly then chooses the answer. Default: false.
	Unverified bool `json:"unverified,omitempty"`

	// Accept the header only when it holds exactly one address. Excludes hops.
	// Default: false.
	SingleValue bool `json:"single_value,omitempty"`

	// Whoever presents a secret may state the client. Default: nobody.
	Proof *Proof `json:"proof,omitempty"`

	trusted []caddyhttp.IPRangeSource
	reads   chainKind
}

// Proof is a shared secret that lets a sender which has no fixed address (a
// backend for a frontend, say) state the client.
type Proof struct {
	// The header that carries the secret. `Proxy-Authorization` is recommended:
	// Caddy's access logs redact it.
	Header string `json:"header,omitempty"`

	// The secrets, any of which is valid, so that one can be rotated out. Write
	// them as `{env.NAME}` or `{file.PATH}`: a literal one can be read in the
	// admin API and in the saved configuration.
	Secrets []string `json:"secrets,omitempty"`

	// The header in which the sender states the client: exactly one address.
	// Default: `X-Client-IP`.
	ClientHeader string `json:"client_header,omitempty"`

	digests [][sha256.Size]byte
}

const maxHops = 64

func (c *Client) validate() error {
	if c.Connection {
		rest := *c
		rest.Connection = false
		if text, _ := json.Marshal(rest); string(text) != "{}" {
			return errors.New("client connection says that nothing stands in front, so nothing else can be said beside it")
		}
		return nil
	}
	if c.Header != "" && !httpguts.ValidHeaderFieldName(c.Header) {
		return fmt.Errorf("header %q is no name of a header", c.Header)
	}
	if c.Hops < 0 || c.Hops > maxHops {
		return fmt.Errorf("hops %d: must be from 1 to %d", c.Hops, maxHops)
	}
	if c.Unverified && c.Hops == 0 {
		return errors.New("unverified says how hops are counted: write hops <n> unverified")
	}
	if c.Hops > 0 && c.SingleValue {
		return errors.New("hops and single_value exclude each other: a header with one value has no hops to count")
	}
	if trusts := len(c.TrustedProxiesRaw) > 0 || c.TrustedProxiesUnix; !trusts {
		switch {
		case c.Hops > 0:
			return errors.New("hops count nothing without a trusted writer: add trusted_proxies (or trusted_proxies_unix) to the same client block")
		case c.SingleValue:
			return errors.New("single_value needs a trusted writer: add trusted_proxies (or trusted_proxies_unix) to the same client block")
		}
	}
	if c.Proof != nil {
		return c.Proof.validate()
	}
	return nil
}

func (p *Proof) validate() error {
	if !httpguts.ValidHeaderFieldName(p.Header) {
		return fmt.Errorf("proof: %q is no name of a header", p.Header)
	}
	if p.ClientHeader != "" && !httpguts.ValidHeaderFieldName(p.ClientHeader) {
		return fmt.Errorf("proof: client_header %q is no name of a header", p.ClientHeader)
	}
	if foldName(p.Header) == foldName(p.clientHeader()) {
		return errors.New("proof: the secret and the client need a header each")
	}
	if len(p.Secrets) == 0 {
		return errors.New("proof: a secret is missing: write proof <header> {env.NAME}")
	}
	for _, secret := range p.Secrets {
		if strings.TrimSpace(secret) == "" {
			return errors.New("proof: an empty secret would let everybody in: give each secret a value")
		}
	}
	return nil
}

func (p *Proof) clientHeader() string {
	if p.ClientHeader == "" {
		return headerClientIP
	}
	return http.CanonicalHeaderKey(p.ClientHeader)
}

func (c *Client) provision(ctx caddy.Context) error {
	if err := c.validate(); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	c.Header = http.CanonicalHeaderKey(c.Header)
	if c.Header == "" {
		c.Header = headerForwardedFor
	}
	c.reads = chainKindOf(c.Header)
	if len(c.TrustedProxiesRaw) > 0 {
		var err error
		if c.trusted, err = loadIPSources(ctx, c, "TrustedProxiesRaw"); err != nil {
			return fmt.Errorf("client: trusted_proxies: %w", err)
		}
	}
	if c.Proof != nil {
		if err := c.Proof.provision(ctx); err != nil {
			return fmt.Errorf("client: %w", err)
		}
	}
	return nil
}

func (p *Proof) provision(ctx caddy.Context) error {
	p.Header = http.CanonicalHeaderKey(p.Header)
	p.digests = nil
	for _, secret := range p.Secrets {
		value, err := resolveSecret(secret)
		if err != nil {
			return fmt.Errorf("proof: %w", err)
		}
		p.digests = append(p.digests, sha256.Sum256([]byte(value)))
	}
	if p.Header != "Proxy-Authorization" && p.Header != "Authorization" {
		ctx.Logger().Warn("the proof's header is written to Caddy's access logs in clear: "+
			"use Proxy-Authorization, which they redact, or delete the field from the logs",
			zap.String("header", p.Header),
			zap.String("log_filter", "format filter { request>headers>"+p.Header+" delete }"))
	}
	return nil
}

// proves says whether value is one of the secrets. All are compared, and by
// digests of one length, so that the time taken tells nothing about them.
func (p *Proof) proves(value string) bool {
	digest := sha256.Sum256([]byte(value))
	var match int
	for i := range p.digests {
		match |= subtle.ConstantTimeCompare(digest[:], p.digests[i][:])
	}
	return match == 1
}

// resolveSecret expands {env.*} and {file.*}, which Caddy does not do in global
// options, and refuses what is empty or not set.
func resolveSecret(s string) (string, error) {
	value, err := caddy.NewReplacer().ReplaceOrErr(s, true, true)
	if err != nil {
		if !strings.Contains(err.Error(), "{env.") && !strings.Contains(err.Error(), "{file.") {
			err = errors.New(`it holds braces around what is no {env.NAME} and no {file.PATH}: write \{ for a brace`)
		}
		return "", fmt.Errorf("a secret could not be read: %w", err)
	}
	if value = strings.TrimSpace(value); value == "" {
		return "", errors.New("a secret is empty: set the variable or the file that it names")
	}
	return value, nil
}

// trusts says whether addr is one of the trusted proxies. Dynamic sources are
// asked anew for each request.
func (c *Client) trusts(r *http.Request, addr netip.Addr) bool {
	return anyContains(c.trusted, r, addr)
}

// anyContains says whether one of the sources' ranges contains addr, which must
// be in its canonical form.
func anyContains(sources []caddyhttp.IPRangeSource, r *http.Request, addr netip.Addr) bool {
	for _, source := range sources {
		for _, prefix := range source.GetIPRanges(r) {
			if contains(prefix, addr) {
				return true
			}
		}
	}
	return false
}

// contains is Prefix.Contains for canonical addresses: an IPv4-mapped range
// (::ffff:10.0.0.0/104) is the IPv4 range that it maps.
func contains(prefix netip.Prefix, addr netip.Addr) bool {
	return unmapped(prefix).Contains(addr)
}

func unmapped(prefix netip.Prefix) netip.Prefix {
	if prefix.Addr().Is4In6() && prefix.Bits() >= 96 {
		return netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-96)
	}
	return prefix
}

// loadIPSources loads modules of the http.ip_sources namespace.
func loadIPSources(ctx caddy.Context, holder any, field string) ([]caddyhttp.IPRangeSource, error) {
	modules, err := ctx.LoadModule(holder, field)
	if err != nil {
		return nil, err
	}
	var sources []caddyhttp.IPRangeSource
	for _, module := range modules.([]any) {
		source, ok := module.(caddyhttp.IPRangeSource)
		if !ok {
			return nil, fmt.Errorf("module %T is not an IP range source", module)
		}
		sources = append(sources, source)
	}
	return sources, nil
}
