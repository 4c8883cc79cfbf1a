package edgelimit

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// requestState is what is known of a request, from the first handler that sees
// it to the last error route. It lives in the request's variables, which error
// routes share.
type requestState struct {
	resolution
	config     *Client // by which it was resolved
	peerAddr   string  // r.RemoteAddr as the connection gave it
	remoteAddr string  // what r.RemoteAddr is while the upstream is told: the client's, if it was resolved
	forged     bool    // identity headers came from somebody who is not trusted
	ipv4Bits   uint8
	ipv6Bits   uint8
	text       [len("[0000:0000:0000:0000:0000:0000:0000:0000]:0")]byte // of remoteAddr
	exceeded   exceeded

	vars       map[string]any
	repl       *caddy.Replacer
	judgements []*counters
	space      [fewCharges]*counters
}

// exceeded is what denied a request, if something did.
type exceeded struct {
	name string
	wait time.Duration // 0: nobody knows, or waiting does not help
}

// stateVar is a name that no Caddyfile writes: a vars directive must not replace
// the state, nor {http.vars.*} show it.
const stateVar = "edge_limit\x00"

// stateOf returns what an earlier handler found out about the request, or nil.
func stateOf(vars map[string]any) *requestState {
	state, _ := vars[stateVar].(*requestState)
	return state
}

// varsOf are the request's variables.
func varsOf(r *http.Request) map[string]any {
	vars, _ := r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	return vars
}

// localAddr is this server's end of the connection.
func localAddr(r *http.Request) net.Addr {
	addr, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return addr
}

// isVirtual says whether the request is Caddy's own, such as an httpInclude of
// templates: it came over no connection.
func isVirtual(local net.Addr) bool { return local == nil }

// isEarly says whether the request came as TLS 1.3 early data, of which neither
// the sender's address nor its freshness is proven (RFC 8446, section 8).
func isEarly(r *http.Request) bool {
	return r.TLS != nil && !r.TLS.HandshakeComplete
}

func isErrorRoute(r *http.Request) bool {
	return r.Context().Value(caddyhttp.ErrorCtxKey) != nil
}

// remember keeps the state, whose client was resolved, for all that comes after,
// and makes Caddy's own client_ip agree with it.
func (s *requestState) remember(r *http.Request, server *caddyhttp.Server) {
	s.peerAddr, s.remoteAddr = r.RemoteAddr, r.RemoteAddr
	switch {
	case !s.resolved():
	case s.source == sourceConnection:
		var space [len(s.text)]byte
		if canonical := s.client.AppendTo(space[:0]); s.clientText() != string(canonical) {
			peer, _ := netip.ParseAddrPort(r.RemoteAddr)
			s.remoteAddr = netip.AddrPortFrom(s.client, peer.Port()).String()
		}
	default:
		// The text lies in the state itself, which is allocated anyway. It is written
		// once, here, and never changed: that is what makes it a string.
		text := netip.AddrPortFrom(s.client, 0).AppendTo(s.text[:0])
		s.remoteAddr = unsafe.String(unsafe.SliceData(text), len(text))
	}
	s.vars[stateVar] = s
	s.logTo(r, server)
	if text := s.clientText(); s.vars[caddyhttp.ClientIPVarKey] != text {
		s.vars[caddyhttp.ClientIPVarKey] = text // a direct client's stands there already
	}
	s.repl, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if s.repl != nil {
		s.repl.Map(s.placeholder)
	}
}

// clientText is the client, or "unresolved".
func (s *requestState) clientText() string {
	if !s.resolved() {
		return unresolvedName
	}
	return hostPart(s.remoteAddr)
}

// logTo adds the request's resolution, and what denied it, to its access log
// entry, if there will be one.
func (s *requestState) logTo(r *http.Request, server *caddyhttp.Server) {
	if server == nil || server.Logs == nil {
		return
	}
	if extra, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
		extra.Set(zap.Object("edge_limit", s))
	}
}

// MarshalLogObject writes the fields of the access log. It runs when the entry
// is written, after all handlers.
func (s *requestState) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddString("client", s.clientText())
	enc.AddString("source", s.source.String())
	if s.reason != reasonNone {
		enc.AddString("reason", s.reason.String())
	}
	if s.exceeded.name != "" {
		enc.AddString("exceeded", s.exceeded.name)
		if s.exceeded.wait > 0 {
			enc.AddInt64("retry_after", retryAfter(s.exceeded.wait))
		}
	}
	return nil
}

// hostPart is the address in "address:port" or "[address]:port".
func hostPart(addrPort string) string {
	host := addrPort[:strings.LastIndexByte(addrPort, ':')]
	if host[0] == '[' {
		return host[1 : len(host)-1]
	}
	return host
}

// placeholder answers for {http.edge_limit.*}.
func (s *requestState) placeholder(name string) (any, bool) {
	switch name {
	case "http.edge_limit.client_ip":
		return s.clientText(), true
	case "http.edge_limit.client":
		return s.clientInKey(), true
	case "http.edge_limit.source":
		return s.source.String(), true
	case "http.edge_limit.reason":
		return s.reason.String(), true
	case "http.edge_limit.exceeded.name":
		return s.exceeded.name, true
	case "http.edge_limit.exceeded.retry_after":
		if s.exceeded.wait > 0 {
			return retryAfter(s.exceeded.wait), true
		}
		return "", true
	}
	return nil, false
}

// clientInKey is the client as keys see it: an address, or a prefix.
func (s *requestState) clientInKey() string {
	if !s.resolved() {
		return unresolvedName
	}
	prefix := clientPrefix(s.client, int(s.ipv4Bits), int(s.ipv6Bits))
	if prefix.IsSingleIP() {
		return prefix.Addr().String()
	}
	return prefix.String()
}

// judged says whether a name was charged, or denied the request, before.
func (s *requestState) judged(c *counters) bool { return slices.Contains(s.judgements, c) }

func (s *requestState) judge(c *counters) {
	if s.judgements == nil {
		s.judgements = s.space[:0]
	}
	if len(s.judgements) == fewCharges {
		s.judgements = slices.Grow(s.judgements, manyCharges-fewCharges)
	}
	s.judgements = append(s.judgements, c)
}
