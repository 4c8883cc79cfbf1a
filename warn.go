package edgelimit

import (
	"net/http"
	"sync"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Warnings name a state that is probably a mistake. Each is logged once in a
// process for a site, over any number of reloads: a mistake must be seen, and a
// flood must not fill the log. None carries a client's address.

// warned holds what was said. Its keys come from configuration and from the
// fixed words of this package, never from a request.
var warned sync.Map

type warningKey struct{ site, what string }

func warnOnce(logger *zap.Logger, site, what, message string, fields ...zap.Field) {
	if _, before := warned.LoadOrStore(warningKey{site, what}, true); !before {
		logger.Warn(message, fields...)
	}
}

// warnResolution says what a doubtful or failed resolution means and how to mend
// it.
func (h *Handler) warnResolution(r *http.Request, res *resolution) {
	warning := "resolve:" + res.reason.String()
	if _, before := warned.Load(warningKey{h.site, warning}); before {
		return // no look-ups for a flood
	}
	fields := []zap.Field{
		zap.String("source", res.source.String()), zap.String("reason", res.reason.String()),
		zap.String("server", serverName(r)), zap.String("advice", h.client.advice(res)),
	}
	if res.resolved() {
		warnOnce(h.logger, h.site, warning, "the client was resolved, but the proxies in front do not look as configured", fields...)
		return
	}
	warnOnce(h.logger, h.site, warning, "a client could not be resolved; it is limited as the option unresolved says", fields...)
}

// advice says what to mend where a client is unresolved or in doubt; "" if there
// is nothing to mend.
func (c *Client) advice(res *resolution) string {
	header := c.Header
	if res.proven && !res.resolved() {
		return c.Proof.advice(res.reason)
	}
	switch res.reason {
	case reasonMissingHeader:
		return "your proxy sends no " + header + ": " + c.addHeaderAdvice() + "; " +
			"for health checks, which carry none, route their path around edge_limit"
	case reasonMalformed:
		return "the entry that must be read in " + header + " is no address: let the proxy write the address of its peer there, and nothing else"
	case reasonNotSingle:
		return "exactly one address is expected: let the proxy replace what came, not append to it, or use hops instead of single_value"
	case reasonNoAddress:
		return "the connection has no address, as on a Unix socket: if a proxy of yours is behind it, add `trusted_proxies_unix` to the client block"
	case reasonShortChain:
		return "the chain is shorter than hops says: some requests pass fewer proxies, or hops is too high; too high is the dangerous direction"
	case reasonUnverifiedHop:
		return "an entry that hops passes over is no trusted proxy: somebody reaches an inner proxy directly, or a proxy's range is missing in trusted_proxies"
	case reasonUntrustedHeader:
		return "a private peer that is not trusted sends " + header + ": if it is your proxy, all its clients share one budget; " +
			"add `trusted_proxies static " + privateRange(res.client).String() + "` to the client block, " +
			"or `client connection` if nothing stands in front"
	}
	if res.unverified {
		return "the answer rests on unverified hops: whoever reaches an inner proxy directly can choose it"
	}
	return ""
}

// addHeaderAdvice says how a proxy is brought to write the header that is read.
func (c *Client) addHeaderAdvice() string {
	value := "$remote_addr"
	switch {
	case c.reads == forwardedChain:
		return "let it append an element with the address of its peer (RFC 7239)"
	case c.Header == headerForwardedFor && !c.SingleValue:
		value = "$proxy_add_x_forwarded_for"
	}
	return "in nginx add `proxy_set_header " + c.Header + " " + value + ";`"
}

// advice says what a sender must mend who has presented the proof.
func (p *Proof) advice(why reason) string {
	switch why {
	case reasonNotSingle:
		return "whoever holds the proof must state exactly one address in " + p.clientHeader() + ", and not a list"
	case reasonMalformed:
		return "what the holder of the proof states in " + p.clientHeader() + " is no address"
	}
	return "whoever holds the proof must state the client: send its address in " + p.clientHeader()
}

// noteRemoved looks at a header that is removed when the request is first seen.
func (h *Handler) noteRemoved(state *requestState, name string) {
	if state.proven && h.forwarder.proof.contains(name) {
		return
	}
	if !state.peerTrusted {
		state.forged = true
		return
	}
	if name == headerForwardedFor || name == h.client.Header || h.forwarder.proof.contains(name) || h.forwarder.writes(name) {
		return
	}
	warnOnce(h.logger, h.site, "removed:"+foldName(name),
		"a header that came through a trusted proxy is removed, so upstreams do not see it any more; if it is the proxy's own and your application reads it, add the line that is named here, which sends the resolved client in it",
		zap.String("header", name), zap.String("line", "forward "+name))
}

// warnEmptyKey says that a part of a key had no value.
func (h *Handler) warnEmptyKey(name, placeholder string) {
	warnOnce(h.logger, h.site, "empty:"+name+":"+placeholder,
		"a part of a key is empty: all such requests share one budget of their own; "+
			"a placeholder that a later handler sets is empty here (order them in a route)",
		zap.String("name", name), zap.String("placeholder", "{"+placeholder+"}"))
}

// warnCost says that a cost was no positive number.
func (h *Handler) warnCost(limit *Limit) {
	warnOnce(h.logger, h.site, "cost:"+limit.Name,
		"a cost is no positive number, and counts as 1", zap.String("limit", limit.Name), zap.String("cost", limit.Cost))
}

// warnDominating looks whether one key makes up most of a limit's traffic. That
// is not your busiest user: it is how a wrong key looks.
func (h *Handler) warnDominating(limit *Limit) {
	top, _ := limit.state.traffic.sketch.Top()
	if top.Share < dominatingShare {
		return
	}
	what, message := "dominating:"+limit.Name, "one key makes up most of a limit's traffic; that is rarely one busy client: "+
		"look whether the limit's key is a proxy's address, for all who come through it (edge_limit_probe shows how a client is resolved)"
	if unresolved, _ := limit.template.hash(&resolution{source: sourceUnresolved}, caddy.NewEmptyReplacer()); top.Hash == unresolved {
		what, message = what+":unresolved", "most of a limit's traffic comes from clients that cannot be resolved, and shares one budget: "+
			"look at the warning that names the reason, and mend the proxy in front"
	}
	warnOnce(h.logger, h.site, what, message,
		zap.String("limit", limit.Name), zap.String("key", hashText(top.Hash)), zap.Float64("share", top.Share))
}

// warnLax says at load what a configuration gives away.
func (h *Handler) warnLax() {
	c := h.client
	if c.Unverified && c.Hops > 1 {
		warnOnce(h.logger, h.site, "unverified",
			"hops are counted unverified: whoever reaches an inner proxy directly chooses the client; "+
				"close that way, or list the proxies' ranges and drop the word unverified",
			zap.Int("hops", c.Hops))
	}
	for _, source := range c.trusted {
		static, ok := source.(*caddyhttp.StaticIPRange)
		if !ok {
			continue // others may need a request to answer
		}
		for _, prefix := range static.GetIPRanges(nil) {
			if unmapped(prefix).Bits() <= 1 { // all, or a half: the other one is not far
				warnOnce(h.logger, h.site, "trusts_everyone",
					"trusted_proxies contains every address: each caller is believed about who the client is, "+
						"so a limit for each client limits nobody; list the ranges of your proxies instead",
					zap.Stringer("range", prefix))
			}
		}
	}
	if len(c.trusted) == 0 && !c.TrustedProxiesUnix {
		return
	}
	warnRemoteHost := func(name string, key []keyPart) {
		if usesRemoteHost(key) {
			warnOnce(h.logger, h.site, "remote_host:"+name,
				"a key holds {remote_host}, which is the proxy's address for all who come through it: write key client",
				zap.String("name", name))
		}
	}
	for _, limit := range h.keyed {
		warnRemoteHost(limit.Name, limit.key)
	}
	for _, inFlight := range h.inFlight {
		warnRemoteHost(inFlight.Name, inFlight.key)
	}
}

// warnUselessStrip says that headers stay which somebody wanted to be removed. A
// global strip under a site's own forward off is no mistake, but an exception.
func (h *Handler) warnUselessStrip(names []string) {
	warnOnce(h.logger, h.site, "strip",
		"forward off leaves all headers as they came, so strip removes none: drop strip, or let Caddy's request_header remove them",
		zap.Strings("strip", names))
}

func serverName(r *http.Request) string {
	if server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok && server != nil {
		return server.Name()
	}
	return ""
}
