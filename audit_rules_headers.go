package edgelimit

import (
	"regexp"
	"slices"
	"strings"
)

var identitySet = newNameSet(identityHeaders...)

// isIdentityHeader says whether a header is one by which upstreams are commonly
// told who the client is.
func isIdentityHeader(name string) bool { return identitySet.contains(name) }

// identityIn names an identity header whose placeholder stands in the text, or
// returns "".
func identityIn(text string) string {
	for _, name := range placeholdersIn(text) {
		if header, ok := strings.CutPrefix(name, "http.request.header."); ok && isIdentityHeader(header) {
			return header
		}
	}
	return ""
}

// quotedPattern finds the quoted strings of an expression.
var quotedPattern = regexp.MustCompile("'[^']*'|\"[^\"]*\"|`[^`]*`")

// identityInMatcher names an identity header that a matcher looks at, or returns
// "".
func identityInMatcher(m *auditMatcher) string {
	for _, field := range m.fields {
		if name := strings.TrimPrefix(field, "!"); isIdentityHeader(name) {
			return name
		}
	}
	for _, arg := range m.args {
		if header := identityIn(arg); header != "" {
			return header
		}
		if m.name != "expression" {
			continue
		}
		for _, quoted := range quotedPattern.FindAllString(arg, -1) {
			if name := quoted[1 : len(quoted)-1]; isIdentityHeader(name) {
				return name
			}
		}
	}
	return ""
}

// onlyShows are handlers that show a value and decide nothing by it.
var onlyShows = []string{"respond", "header", "log_append", "error", "redir"}

// judgeIdentityReaders finds what reads an identity header outside the resolver:
// the value is the caller's, or it is gone.
func (a *audit) judgeIdentityReaders() {
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		how := severityWarning
		if slices.Contains(onlyShows, s.name) {
			how = severityNote
		}
		for _, text := range s.texts {
			a.reportReader(how, text.spot, identityIn(text.text), course, "")
		}
		everyMatcher(s.matchers, func(m *auditMatcher) {
			a.reportReader(severityWarning, m.spot, identityInMatcher(m), course, "a matcher decides by it: ")
		})
		if s.edge != nil && !a.config.forwardOff(s.edge) {
			behind := *course
			behind.ran = append(slices.Clip(course.ran), s)
			everyMatcher(s.edge.matchers, func(m *auditMatcher) {
				a.reportReader(severityWarning, m.spot, identityInMatcher(m), &behind, "a matcher decides by it: ")
			})
		}
		if s.proxy != nil && isIdentityHeader(s.proxy.lbHeader) {
			a.reportReader(severityWarning, s.proxy.lbSpot, s.proxy.lbHeader, course, "the upstream is chosen by it: ")
		}
	})
}

func (a *audit) reportReader(how severity, at spot, header string, course *auditCourse, what string) {
	if header == "" {
		return
	}
	if edge := course.resolved(); edge != nil && !a.config.forwardOff(edge) {
		if !a.config.tells(edge, header) {
			a.report(how, ruleIdentityRead, at, "write {http.edge_limit.client_ip}, or match with client_ip",
				"%sbehind edge_limit %s is always absent, because it is removed from every request", what, header)
		}
		return
	}
	a.report(how, ruleIdentityRead, at, "write {client_ip} or match with client_ip, which Caddy works out from the connection and from trusted proxies",
		"%s%s is whatever the caller wrote", what, header)
}

// tells says whether edge_limit writes the client into that header.
func (c *auditConfig) tells(e *auditEdge, header string) bool {
	forward := e.Forward
	if forward == nil && c.app != nil {
		forward = c.app.Forward
	}
	return slices.ContainsFunc(forward, func(name string) bool { return foldName(name) == foldName(header) })
}

// judgeIdentityWriters finds what writes an identity header beside edge_limit.
func (a *audit) judgeIdentityWriters() {
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		for _, w := range s.writes {
			if isIdentityHeader(w.name) {
				a.judgeWrite(w, s, course)
			}
		}
	})
}

func (a *audit) judgeWrite(w auditWrite, s *auditStep, course *auditCourse) {
	behind := a.config.rewritten(course)
	mend := "write forward " + w.name + " into edge_limit instead"
	if foldName(w.name) == foldName(headerForwardedFor) {
		mend = "leave it out: the upstream gets the client in it anyway"
	}
	if w.deletes {
		if behind && !s.isProxy() && foldName(w.name) == foldName(headerForwardedFor) {
			a.report(severityNote, ruleIdentityWritten, w.spot, "leave it out: edge_limit has removed the header",
				"this also removes the mark that keeps the upstream from being told the proxy's address for an unresolved client")
		}
		return
	}
	for _, name := range placeholdersIn(w.value) {
		writer := writerOf(name)
		header, _ := strings.CutPrefix(name, "http.request.header.")
		switch {
		case behind && header != name && isIdentityHeader(header):
			a.report(severityWarning, ruleIdentityWritten, w.spot, mend,
				"%s is written from %s, which edge_limit has removed: the upstream gets an empty value", w.name, header)
		case writer == writerCaller && name != "http.request.remote", writer == writerClientIP && course.resolved() == nil && course.site.server.lax():
			a.report(severityWarning, ruleIdentityWritten, w.spot,
				"write {remote_host}, or {client_ip} with trusted_proxies_strict; or put edge_limit before it and write forward "+w.name,
				"%s is written from {%s}: the upstream is told what the caller wrote", w.name, shortName(name))
		case behind && (writer == writerPeer || writer == writerClientIP || name == "http.request.remote"):
			a.report(severityNote, ruleIdentityWritten, w.spot, mend,
				"%s is written beside edge_limit: for an unresolved client the upstream is told something that is no client", w.name)
		}
	}
}

// remoteIPPattern finds the function in an expression.
var remoteIPPattern = regexp.MustCompile(`\bremote_ip\s*\(`)

// judgeRemoteIP finds remote_ip matchers behind edge_limit: they see the client.
func (a *audit) judgeRemoteIP() {
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		edge := course.resolved()
		if edge == nil || a.config.forwardOff(edge) || !a.config.trustsAnybody(edge, course.site.server) {
			return
		}
		everyMatcher(s.matchers, func(m *auditMatcher) {
			if m.name == "remote_ip" || m.name == "expression" && slices.ContainsFunc(m.args, remoteIPPattern.MatchString) {
				a.report(severityWarning, ruleRemoteIP, m.spot,
					"write client_ip, if the client is meant; to match the proxy, decide before edge_limit: in a handle around it, or earlier in a route",
					"behind edge_limit remote_ip sees the client, not the proxy that connected")
			}
		})
	})
}
