package edgelimit

import (
	"slices"
	"strings"
)

// Two well-known plugins have a directive rate_limit, and JSON handlers of that
// name. What they key on is read here, and who writes it.

// auditLimiter is a rate_limit handler.
type auditLimiter struct {
	zones []auditZone
}

// auditZone is one limit of it.
type auditZone struct {
	spot
	name  string
	key   string
	match string
	short bool // of the plugin that has placeholders of its own
}

// limiterOfNode reads either form:
//
//	rate_limit [<matcher>] {
//		zone <name> {
//			key    <key>
//			match  { <matchers> }
//			...
//		}
//	}
//	rate_limit [<matcher>] <key> <rate> [<zone_size> [<reject_status>]]
func limiterOfNode(n *auditNode) *auditLimiter {
	limiter := new(auditLimiter)
	args := n.args
	if len(args) > 0 && isMatcherArgument(args[0]) {
		args = args[1:]
	}
	if len(args) > 0 {
		limiter.zones = append(limiter.zones, auditZone{spot: n.spot, key: args[0], short: true})
	}
	for _, child := range n.children {
		if child.name != "zone" {
			continue
		}
		zone := auditZone{spot: child.spot, name: lastOf(child.args)}
		for _, line := range child.children {
			switch line.name {
			case "key":
				zone.key, zone.spot = lastOf(line.args), line.spot
			case "match":
				zone.match = matchText(matchersIn(line.children))
			}
		}
		limiter.zones = append(limiter.zones, zone)
	}
	return limiter
}

// limiterOfJSON reads the same from a handler.
func limiterOfJSON(v auditValue) *auditLimiter {
	limiter := new(auditLimiter)
	if key := v.get("key"); key.text() != "" {
		limiter.zones = append(limiter.zones, auditZone{spot: key.spot(), key: key.text(), short: true})
	}
	for _, zone := range v.get("rate_limits").members() {
		limiter.zones = append(limiter.zones, auditZone{
			spot: zone.get("key").spot(), name: zone.name, key: zone.get("key").text(),
			match: matchText(zone.get("match").matchers()),
		})
	}
	return limiter
}

// judgeOtherLimiters judges what other limiters key on.
func (a *audit) judgeOtherLimiters() {
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		if s.limiter == nil {
			return
		}
		for i := range s.limiter.zones {
			a.judgeZone(&s.limiter.zones[i], s, course)
		}
	})
}

func (a *audit) judgeZone(zone *auditZone, s *auditStep, course *auditCourse) {
	what := "rate_limit"
	if zone.name != "" {
		what += " zone " + zone.name
	}
	server := course.site.server
	for _, name := range placeholdersIn(zone.key) {
		if isUnknown(name, zone.short) {
			a.report(severityWarning, ruleUnknown, zone.spot, "write {remote_host}, or {client_ip} behind proxies that are trusted strictly",
				"%s: Caddy knows no {%s}, so it is empty: all requests share one budget", what, name)
			continue
		}
		switch writerOf(name) {
		case writerForwarded:
			if !a.config.rewritten(course) {
				a.report(severityError, ruleRenewableKey, zone.spot,
					"put edge_limit before it, which removes that header from everybody, or key on {remote.host}",
					"%s: {%s} is the first entry of X-Forwarded-For, from anybody who sends one: the caller writes it, and gets a new budget with each value", what, name)
			}
		case writerClientIP:
			if course.resolved() == nil && server.lax() {
				a.report(severityError, ruleLaxClientIP, zone.spot,
					"add trusted_proxies_strict to the servers option, or put edge_limit before it",
					"%s: {%s} is the leftmost entry of the header, because the server's trusted_proxies are not strict: the caller writes it, and gets a new budget with each value", what, shortName(name))
			}
		case writerPeer:
			if !a.config.rewritten(course) && server.trusts() {
				a.report(severityWarning, rulePeerKey, zone.spot,
					"key on {client_ip}, with trusted_proxies_strict in the servers option; or put edge_limit before it",
					"%s: {%s} is the proxy's address where the server's trusted_proxies connect: all who come through one proxy share one budget", what, shortName(name))
			}
		case writerHost:
			if !course.namesHosts() {
				a.judgeRenewable(what, name, zone, s, course)
			}
		case writerCaller:
			a.judgeRenewable(what, name, zone, s, course)
		}
	}
}

func (a *audit) judgeRenewable(what, name string, zone *auditZone, s *auditStep, course *auditCourse) {
	how := "is written by the caller"
	if name == "http.request.remote" || strings.HasSuffix(name, "remote.port") {
		how = "holds the port, which is new with each connection of the caller"
	}
	if by := a.boundOfZone(zone, s, course); by != "" {
		a.report(severityNote, ruleBoundedKey, zone.spot, "nothing, if that bound is low enough",
			"%s: {%s} in its key %s, who gets a new budget with each value; %s bounds what that is worth", what, shortName(name), how, by)
		return
	}
	a.report(severityError, ruleRenewableKey, zone.spot,
		"add a limit that nothing in a request can influence (a zone with a static key, an edge_limit ceiling), or one by client address",
		"%s: {%s} in its key %s, who gets a new budget with each value, and nothing bounds it", what, shortName(name), how)
}

// boundOfZone names what no caller can escape on the same requests, or returns
// "".
func (a *audit) boundOfZone(zone *auditZone, s *auditStep, course *auditCourse) string {
	for _, other := range append(slices.Clip(course.ran), course.beside...) {
		if other.edge != nil && other.edge.match == "" {
			limits, _, ceilings := a.config.budgets(other.edge)
			if by := boundedBy("", nil, limits, ceilings); by != "" {
				return by
			}
		}
		if other.limiter == nil || !covers(matchText(other.matchers), matchText(s.matchers)) {
			continue
		}
		for i := range other.limiter.zones {
			z := &other.limiter.zones[i]
			if z != zone && covers(z.match, zone.match) && a.standsFast(z, course) {
				return strings.TrimSpace("the zone " + z.name)
			}
		}
	}
	return ""
}

// standsFast says whether no caller can renew a zone's key.
func (a *audit) standsFast(zone *auditZone, course *auditCourse) bool {
	for _, name := range placeholdersIn(zone.key) {
		switch writerOf(name) {
		case writerPeer:
		case writerClientIP:
			if course.resolved() == nil && course.site.server.lax() {
				return false
			}
		case writerForwarded:
			if !a.config.rewritten(course) {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// namesHosts says whether only requests for hosts that are written out get here.
func (c *auditCourse) namesHosts() bool {
	hosts := c.site.hosts
	if c.hosts != "" {
		hosts = strings.Split(c.hosts, " ")
	}
	return len(hosts) > 0 && !slices.ContainsFunc(hosts, func(host string) bool {
		return host == "" || strings.ContainsAny(host, "*{")
	})
}
