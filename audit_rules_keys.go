package edgelimit

import (
	"math"
	"slices"
	"strings"
)

// edges calls f for each edge_limit handler.
func (a *audit) edges(f func(*auditEdge, *auditCourse)) {
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		if s.edge != nil {
			f(s.edge, course)
		}
	})
}

// judgeEdgeKeys says what callers can renew, and what bounds that. What nothing
// bounds edge_limit refuses to load.
func (a *audit) judgeEdgeKeys() {
	a.edges(func(e *auditEdge, course *auditCourse) {
		limits, inFlight, ceilings := a.config.budgets(e)
		for _, l := range limits {
			placeholder, where := callerWritten(l.key), "key"
			if placeholder == "" {
				placeholder, where = callerWritten(l.cost.parts), "cost"
			}
			a.judgePeerKey(e, course, "limit", l.Name, l.key)
			a.judgeUnknown(e, "limit", l.Name, l.key)
			switch {
			case placeholder == "" || l.KeyWriter == "server" || strings.HasPrefix("{"+placeholder, unsetPrefix):
			case l.KeyWriter == "caller":
				a.report(severityNote, ruleKeyWriterCaller, a.config.spotOf(e, l.Name), "nothing, if that is meant",
					"limit %s: {%s} in its %s is written by the caller, and key_writer caller says that this is known: it throttles accidents, not attempts", l.Name, shortName(placeholder), where)
			default:
				a.judgeCallerKey(e, "limit", l.Name, where, placeholder, boundedBy(l.match, l, limits, ceilings))
			}
		}
		for _, f := range inFlight {
			a.judgePeerKey(e, course, "in_flight", f.Name, f.key)
			a.judgeUnknown(e, "in_flight", f.Name, f.key)
			if placeholder := callerWritten(f.key); placeholder != "" {
				a.judgeCallerKey(e, "in_flight", f.Name, "key", placeholder, boundedBy(f.match, nil, limits, ceilings))
			}
		}
	})
}

func (a *audit) judgeCallerKey(e *auditEdge, kind, name, where, placeholder, bound string) {
	if bound != "" {
		a.report(severityNote, ruleBoundedKey, a.config.spotOf(e, name), "nothing, if that bound is low enough",
			"%s %s: {%s} in its %s is written by the caller, who escapes it with another value; %s bounds what that is worth", kind, name, shortName(placeholder), where, bound)
		return
	}
	at := e.at("name:" + name) // a limit of the global block may be bounded in one site, and not in another
	a.report(severityError, ruleRenewableKey, at,
		"add an enforced ceiling, or a limit with key client, on the same match to this edge_limit; or, in a limit, say key_writer server if your own server sets it",
		"%s %s: {%s} in its %s is written by the caller, who escapes it with another value each time, and nothing bounds it", kind, name, shortName(placeholder), where)
}

// boundedBy names what bounds a match as bounded judges it, or returns "".
func boundedBy(match string, itself *Limit, limits []*Limit, ceilings []*Ceiling) string {
	for _, c := range ceilings {
		if bounded(match, itself, nil, []*Ceiling{c}) {
			return "the ceiling " + c.Name
		}
	}
	for _, l := range limits {
		if bounded(match, itself, []*Limit{l}, nil) {
			return "the limit " + l.Name
		}
	}
	return ""
}

func (a *audit) judgePeerKey(e *auditEdge, course *auditCourse, kind, name string, key []keyPart) {
	if usesRemoteHost(key) && a.config.trustsAnybody(e, course.site.server) {
		a.report(severityWarning, rulePeerKey, a.config.spotOf(e, name), "write key client",
			"%s %s: {remote_host} in its key is the proxy's address for all who come through it: they share one budget", kind, name)
	}
}

func (a *audit) judgeUnknown(e *auditEdge, kind, name string, key []keyPart) {
	for _, part := range key {
		for _, piece := range part.pieces {
			if piece.placeholder && isUnknown(piece.text, false) {
				a.report(severityWarning, ruleUnknown, a.config.spotOf(e, name), "write key client, if that is meant",
					"%s %s: Caddy knows no {%s}, so it is empty: all requests share one budget", kind, name, piece.text)
			}
		}
	}
}

// userPlaceholder is how placeholders begin that only a log-in sets.
const userPlaceholder = "http.auth.user."

// judgeLateAuth finds keys that are evaluated before somebody has logged in: all
// requests then share one budget.
func (a *audit) judgeLateAuth() {
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		if s.edge != nil {
			limits, inFlight, _ := a.config.budgets(s.edge)
			for _, l := range limits {
				at := a.config.spotOf(s.edge, l.Name)
				a.judgeUserKey(at, "limit "+l.Name, rawParts(l.key), course)
				if l.KeyWriter == "server" {
					a.judgeServerKey(at, l, course)
				}
			}
			for _, f := range inFlight {
				a.judgeUserKey(a.config.spotOf(s.edge, f.Name), "in_flight "+f.Name, rawParts(f.key), course)
			}
		}
		if s.limiter != nil {
			for _, zone := range s.limiter.zones {
				a.judgeUserKey(zone.spot, strings.TrimSpace("rate_limit "+zone.name), []string{zone.key}, course)
			}
		}
	})
}

func (a *audit) judgeUserKey(at spot, what string, parts []string, course *auditCourse) {
	i := slices.IndexFunc(parts, func(part string) bool { return strings.Contains(part, "{"+userPlaceholder) })
	if i < 0 || course.passed((*auditStep).authenticates) {
		return
	}
	a.report(severityWarning, ruleLateAuth, at,
		"write route { basic_auth ...; then the limiter }, in which directives run as they stand",
		"%s: {http.auth.user...} in its key is empty here, because nobody has logged in yet when it is evaluated: all requests share one budget", what)
}

// judgeServerKey finds a header that key_writer server calls the server's own,
// and that the server sets only later.
func (a *audit) judgeServerKey(at spot, l *Limit, course *auditCourse) {
	for _, part := range l.key {
		for _, piece := range part.pieces {
			header, ok := strings.CutPrefix(piece.text, "http.request.header.")
			sets := func(s *auditStep) bool { return s.setsHeader(header) }
			if !ok || !piece.placeholder || course.passed(sets) || !course.site.has(sets) {
				continue
			}
			a.report(severityWarning, ruleLateAuth, at,
				"write route { forward_auth ...; then edge_limit }, in which directives run as they stand",
				"limit %s: key_writer server says that this server sets %s, but it does so later: here the value is still the caller's", l.Name, header)
		}
	}
}

// passed says whether a request may have passed such a step.
func (c *auditCourse) passed(is func(*auditStep) bool) bool {
	return slices.ContainsFunc(c.ran, is) || slices.ContainsFunc(c.maybe, is)
}

// has says whether such a step is anywhere in the site.
func (site *auditSite) has(is func(*auditStep) bool) (found bool) {
	walk(site.steps, auditCourse{site: site}, func(s *auditStep, _ *auditCourse) { found = found || is(s) })
	return found
}

// authenticates says whether the handler sets a user. What is not known may.
func (s *auditStep) authenticates() bool {
	return s.name == "basic_auth" || !slices.Contains(knownHandlers, s.name)
}

// setsHeader says whether the handler sets a request header. What is not known
// may.
func (s *auditStep) setsHeader(name string) bool {
	return slices.ContainsFunc(s.writes, func(w auditWrite) bool { return !w.deletes && strings.EqualFold(w.name, name) }) ||
		!slices.Contains(knownHandlers, s.name)
}

// knownHandlers are those of Caddy and ours, by directive and in JSON.
var knownHandlers = append(slices.Clone(directiveOrder),
	"handle_response", "handle_errors", "subroute", "file_server", "copy_response", "copy_response_headers",
	"tracing", "log_append", "headers", "rewrite", "encode", "")

// judgeReach finds budgets that can never deny because another one of the same
// handler always denies before. Only what no key can split is compared.
func (a *audit) judgeReach() {
	uses := make(map[string]int) // by name: of how many handlers
	a.edges(func(e *auditEdge, _ *auditCourse) {
		limits, _, ceilings := a.config.budgets(e)
		for _, l := range limits {
			uses[l.Name]++
		}
		for _, c := range ceilings {
			uses[c.Name]++
		}
	})
	a.edges(func(e *auditEdge, _ *auditCourse) {
		limits, _, ceilings := a.config.budgets(e)
		for _, l := range limits {
			if by := ceilingBefore(l, ceilings); by != nil && uses[l.Name] == 1 {
				a.report(severityWarning, ruleIdleLimit, a.config.spotOf(e, l.Name),
					"lower the limit, or raise the ceiling",
					"limit %s never denies: the ceiling %s denies before, so a single client can use it up for everybody", l.Name, by.Name)
			}
		}
		for _, c := range ceilings {
			if by := boundBefore(c, limits, ceilings); by != "" && uses[c.Name] == 1 {
				a.report(severityNote, ruleIdleCeiling, a.config.spotOf(e, c.Name),
					"lower the ceiling, or leave it out",
					"ceiling %s never denies: %s lets fewer requests through", c.Name, by)
			}
		}
	})
}

// ceilingBefore is a ceiling under which no key of the limit can come near it,
// or nil.
func ceilingBefore(l *Limit, ceilings []*Ceiling) *Ceiling {
	if l.Observe || l.OnStatus != nil || l.cost.fixed != 1 || l.rate.count == 0 {
		return nil
	}
	for _, c := range ceilings {
		if !c.Observe && c.rate.count > 0 && covers(c.match, l.match) &&
			l.burst() >= c.rate.count && l.rate.perSecond() >= c.rate.perSecond() {
			return c
		}
	}
	return nil
}

// boundBefore names what admits fewer requests than the ceiling, or returns "".
func boundBefore(c *Ceiling, limits []*Limit, ceilings []*Ceiling) string {
	if c.Observe || c.rate.count == 0 {
		return ""
	}
	most := float64(c.rate.count)
	for _, l := range limits {
		fixed := !slices.ContainsFunc(l.key, func(part keyPart) bool { return !part.literal() })
		if len(l.key) == 0 || !fixed || l.Observe || l.exempted || l.OnStatus != nil || l.cost.fixed < 1 || !covers(l.match, c.match) {
			continue
		}
		if float64(l.burst())+l.rate.perSecond()*c.rate.window.Seconds() < most {
			return "the limit " + l.Name
		}
	}
	for _, other := range ceilings {
		if other == c || other.Observe || other.rate.count == 0 || !covers(other.match, c.match) {
			continue
		}
		windows := math.Ceil(c.rate.window.Seconds() / other.rate.window.Seconds())
		if float64(other.rate.count)*windows < most {
			return "the ceiling " + other.Name
		}
	}
	return ""
}

func (r rate) perSecond() float64 { return float64(r.count) / r.window.Seconds() }
