package edgelimit

import (
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// judgeServerTrust looks at whom servers and reverse proxies believe.
func (a *audit) judgeServerTrust() {
	for _, s := range a.config.servers {
		if s.lax() {
			a.report(severityWarning, ruleLaxTrustedProxies, s.spot, "add trusted_proxies_strict beside it",
				"a server that trusts proxies without trusted_proxies_strict takes the leftmost entry of the header for the client, and that is what the caller wrote: "+
					"{client_ip}, client_ip matchers and access logs show what he likes")
		}
		for _, source := range s.trusted {
			a.judgeRanges(source, "trusted_proxies", "any caller is believed about who the client is")
		}
		for _, source := range s.proxyProtocol {
			a.judgeRanges(source, "proxy_protocol", "any caller can say what address his connection comes from")
		}
	}
	a.config.eachStep(func(s *auditStep, _ *auditCourse) {
		if s.proxy != nil {
			for _, source := range s.proxy.trusted {
				a.judgeRanges(source, s.name+"'s trusted_proxies", "any caller's X-Forwarded-* headers go on to the upstream")
			}
		}
	})
}

func (a *audit) judgeRanges(source auditRanges, what, means string) {
	switch everyone := widest(source.ranges); {
	case source.everyone:
		a.report(severityError, ruleTrustsEveryone, source.spot, "drop the policy, and name the proxies in allow",
			"%s believes every address: %s", what, means)
	case source.source == "static" && everyone != "":
		a.report(severityError, ruleTrustsEveryone, source.spot, "list the ranges of your proxies, and nothing else",
			"%s contains %s: %s", what, everyone, means)
	}
}

// judgeEdgeTrust looks at whom edge_limit believes.
func (a *audit) judgeEdgeTrust() {
	a.blocks(func(e *auditEdge) {
		if e.Client == nil {
			return
		}
		for i, raw := range e.Client.TrustedProxiesRaw {
			source := rangesOfJSON(auditValue{value: decoded(raw)})
			source.spot = e.at("trusted_proxies" + sourceIndex(i))
			a.judgeRanges(source, "trusted_proxies", "any caller is believed about who the client is, so a limit for each client limits nobody")
		}
		if e.Client.Unverified && e.Client.Hops > 1 {
			a.report(severityWarning, ruleUnverifiedHops, e.at("hops"),
				"close the way to the inner proxies, or list their ranges and drop the word unverified; a ceiling holds in any case",
				"hops are counted, not verified: whoever reaches an inner proxy directly chooses the client")
		}
	})
}

// blocks calls f for each edge_limit block, the global one first.
func (a *audit) blocks(f func(*auditEdge)) {
	if a.config.app != nil {
		f(a.config.app)
	}
	a.edges(func(e *auditEdge, _ *auditCourse) { f(e) })
}

// Ranges so wide hold more than proxies: no one has a network of more than a /8,
// or of more than a /16 of the addresses in use on the IPv6 internet.
const (
	widestIPv4 = 8
	widestIPv6 = 16
)

var ipv6Internet = netip.MustParsePrefix("2000::/3")

// widest says in words what ranges contain that hold everybody, or a large part
// of the internet; "" if they do not.
func widest(ranges []string) string {
	var prefixes []netip.Prefix
	for _, text := range ranges {
		prefix, err := caddyhttp.CIDRExpressionToPrefix(text)
		if err != nil {
			continue
		}
		if prefix.Addr().Is4In6() && prefix.Bits() >= 96 {
			prefix = netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-96)
		}
		prefixes = append(prefixes, prefix.Masked())
		wide := prefix.Addr().Is4() && prefix.Bits() < widestIPv4 ||
			prefix.Addr().Is6() && prefix.Bits() < widestIPv6 && prefix.Overlaps(ipv6Internet)
		switch {
		case prefix.Bits() == 0:
			return text + ", every address"
		case wide:
			return text + ", a large part of all addresses"
		}
	}
	for _, all := range []string{"0.0.0.0/0", "2000::/3"} {
		if together(prefixes, netip.MustParsePrefix(all)) {
			return "every address of " + all + " in parts"
		}
	}
	return ""
}

// together says whether the prefixes contain all of whole, alone or together.
func together(prefixes []netip.Prefix, whole netip.Prefix) bool {
	inside := slices.DeleteFunc(slices.Clone(prefixes), func(p netip.Prefix) bool { return !p.Overlaps(whole) })
	switch {
	case len(inside) == 0:
		return false
	case slices.ContainsFunc(inside, func(p netip.Prefix) bool { return p.Bits() <= whole.Bits() }):
		return true
	}
	lower := netip.PrefixFrom(whole.Addr(), whole.Bits()+1)
	upper := lower.Addr().AsSlice()
	upper[whole.Bits()/8] |= 0x80 >> (whole.Bits() % 8)
	address, _ := netip.AddrFromSlice(upper)
	return together(inside, lower) && together(inside, netip.PrefixFrom(address, whole.Bits()+1))
}

// judgeClearSecrets finds secrets that can be read in the configuration.
func (a *audit) judgeClearSecrets() {
	const means = "can be read in the admin API and in the saved configuration"
	a.blocks(func(e *auditEdge) {
		if e.Client != nil && e.Client.Proof != nil && slices.ContainsFunc(e.Client.Proof.Secrets, inClear) {
			a.report(severityWarning, ruleSecretInClear, e.at("proof"),
				"write {env.NAME} or {file.PATH}, which is read when the configuration is loaded; {$NAME} is not that",
				"the proof's secret stands in the configuration as text, where it "+means)
		}
		if inClear(e.pepper) {
			a.report(severityWarning, ruleSecretInClear, e.at("pepper"),
				"write {env.NAME} or {file.PATH}; or without a store leave it out, and it is random and kept in Caddy's storage",
				"the pepper stands in the configuration as text, where it "+means)
		}
		if inClear(e.storePassword) {
			a.report(severityWarning, ruleSecretInClear, e.at("store_password"), "write {env.NAME} or {file.PATH}",
				"the store's password stands in the configuration as text, where it "+means)
		}
	})
}

// inClear says whether a secret is text, not a placeholder.
func inClear(secret string) bool {
	return secret != "" && !strings.Contains(secret, "{env.") && !strings.Contains(secret, "{file.") &&
		!strings.Contains(secret, "{http.request.uri.path.file.") // what a Caddyfile makes of {file.NAME}
}

// title names the log.
func (l *auditLog) title() string {
	if l.spot == (spot{}) {
		return "the access log, which is Caddy's default log,"
	}
	return "the access log at " + l.spot.String()
}

// plainName is a name that nobody would take for a secret: a secret may stand
// there by mistake, and is not told.
var plainName = regexp.MustCompile(`^[A-Za-z-]{1,32}$`)

// judgeLoggedSecrets finds logs that show the header of a proof.
func (a *audit) judgeLoggedSecrets() {
	a.edges(func(e *auditEdge, course *auditCourse) {
		client, said := a.config.client(e)
		if client == nil || client.Proof == nil {
			return
		}
		header := http.CanonicalHeaderKey(client.Proof.Header)
		server := course.site.server
		redacted := header == "Proxy-Authorization" || header == "Authorization"
		if redacted && (server == nil || !server.logCredentials) {
			return
		}
		name := header
		shows := func(l auditLog) bool { return !l.hides(name) }
		if !plainName.MatchString(header) {
			header = "<the header>"
		}
		mend := "use Proxy-Authorization, which Caddy redacts; or add to the log: format filter { request>headers>" + header + " delete }"
		if redacted {
			mend = "drop log_credentials; or add to the log: format filter { request>headers>" + header + " delete }"
		}
		logs := course.site.logsOf(course.hosts)
		switch i := slices.IndexFunc(logs, shows); {
		case i >= 0:
			a.report(severityWarning, ruleSecretInLog, said.at("proof"), mend,
				"%s shows the proof's header %s, secret and all", logs[i].title(), header)
		case shows(a.config.errorLog):
			a.report(severityNote, ruleSecretInLog, said.at("proof"), strings.Replace(mend, "to the log", "to the global log", 1),
				"Caddy's default log gets the headers of each request that ends in an error of the server (5xx), and the proof's header %s among them", header)
		}
	})
}
