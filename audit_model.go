package edgelimit

import (
	"cmp"
	"slices"
	"strings"
)

// auditConfig is a configuration as the rules see it, whatever it was written in.
type auditConfig struct {
	app     *auditEdge // the global edge_limit block; nil if there is none
	sites   []*auditSite
	servers []*auditServer
	// errorLog is where errors go, where nothing else is said.
	errorLog auditLog
	remarks  []finding // what was found while reading
}

// auditServer is what is said of a server, beside its sites.
type auditServer struct {
	spot                  // where it says whom it trusts
	listener       string // of Caddy's server options: "" is for all others
	trusted        []auditRanges
	unix           bool // trusts peers on Unix sockets
	strict         bool
	headers        []string // where the client is read from; nil: X-Forwarded-For
	logCredentials bool
	proxyProtocol  []auditRanges // who may say where a connection comes from
}

// auditRanges is a source of address ranges, as it is written.
type auditRanges struct {
	spot
	source   string
	ranges   []string
	everyone bool // no range limits it at all
}

func (s *auditServer) trusts() bool { return s != nil && (len(s.trusted) > 0 || s.unix) }

// lax says whether Caddy's client_ip is a value that the caller wrote: the
// leftmost of a list that proxies append to.
func (s *auditServer) lax() bool {
	if !s.trusts() || s.strict {
		return false
	}
	return len(s.headers) == 0 || slices.ContainsFunc(s.headers, func(name string) bool {
		return !isIdentityHeader(name) || isChain(name)
	})
}

// isChain says whether proxies append to the header. Into the other identity
// headers they write one address in the place of what came, so that the leftmost
// entry is theirs.
func isChain(name string) bool { return strings.Contains(foldName(name), foldName(headerForwarded)) }

// auditSite is what is served together: a site of a Caddyfile, or a server in
// JSON.
type auditSite struct {
	spot
	name        string
	hosts       []string // "" is any
	listen      []string
	server      *auditServer // may be nil
	steps       []*auditStep
	errorRoutes []*auditStep
	logs        []auditLog
}

// auditLog is a log that gets requests with their headers.
type auditLog struct {
	spot
	host     string   // whose requests it gets; "" is for all that no other log is for
	filtered []string // fields that a filter removes or changes
}

// hides says whether the log does not show the header. Caddy compares the names
// of fields as they are, so a filter with other capitals does nothing.
func (l *auditLog) hides(canonical string) bool {
	return slices.ContainsFunc(l.filtered, func(field string) bool {
		return field == "request" || field == "request>headers" || field == "request>headers>"+canonical
	})
}

// logsOf are the logs that requests for the hosts are written to.
func (site *auditSite) logsOf(hosts string) (logs []auditLog) {
	for _, l := range site.logs {
		if l.host != "" && slices.Contains(strings.Split(hosts, " "), l.host) {
			logs = append(logs, l)
		}
	}
	if len(logs) > 0 {
		return logs
	}
	for _, l := range site.logs {
		if l.host == "" {
			logs = append(logs, l)
		}
	}
	return logs
}

// auditStep is a handler, in the order in which handlers run.
type auditStep struct {
	spot
	name     string // the directive, also where it was written as JSON
	group    string // of steps in one group at most one runs
	hosts    string // the hosts that it is for, where a site cannot tell
	matchers []auditMatcher
	texts    []auditText
	children []*auditStep
	onError  []*auditStep // error routes of its own

	edge    *auditEdge
	limiter *auditLimiter
	proxy   *auditProxy
	writes  []auditWrite // of request headers
}

// auditText is text in which placeholders can stand.
type auditText struct {
	spot
	text string
}

// auditMatcher is one matcher of a set; inner ones are those of a not.
type auditMatcher struct {
	spot
	name   string
	args   []string
	fields []string // request headers that it looks at
	inner  []auditMatcher
}

// auditWrite is an operation on a header of the request.
type auditWrite struct {
	spot
	name    string
	value   string
	deletes bool
}

// auditProxy is what matters of a reverse proxy.
type auditProxy struct {
	trusted       []auditRanges
	proxyProtocol *spot // where it is told to speak the PROXY protocol
	ownResponse   bool  // something is made of what the upstream answers
	lbHeader      string
	lbSpot        spot
}

// auditEdge is an edge_limit block: a directive, or the global option.
type auditEdge struct {
	spot
	Options
	match    string         // what it limits, as text; "" is all
	matchers []auditMatcher // all that are in it, also in its limits
	use      []string
	limits   []*Limit
	inFlight []*InFlight
	ceilings []*Ceiling
	pepper   string

	storePassword string

	spots map[string]spot // where its parts are written: client, hops, proof, pepper, name:<name> ...
}

// at is where a part is written, or the block itself.
func (e *auditEdge) at(part string) spot {
	if at, ok := e.spots[part]; ok {
		return at
	}
	return e.spot
}

func (s *auditStep) isProxy() bool {
	return s.name == "reverse_proxy" || s.name == "php_fastcgi" || s.name == "forward_auth"
}

// everyMatcher calls f for each matcher, inner ones too.
func everyMatcher(matchers []auditMatcher, f func(*auditMatcher)) {
	for i := range matchers {
		f(&matchers[i])
		everyMatcher(matchers[i].inner, f)
	}
}

// matchText writes matchers so that two sets can be compared; none is "".
func matchText(matchers []auditMatcher) string {
	var parts []string
	for _, m := range matchers {
		part := m.name + " " + strings.Join(m.args, " ")
		if len(m.inner) > 0 {
			part += " {" + matchText(m.inner) + "}"
		}
		parts = append(parts, part)
	}
	slices.Sort(parts)
	return strings.Join(parts, "; ")
}

// auditCourse is what is known about a request when it reaches a step.
type auditCourse struct {
	site     *auditSite
	hosts    string
	inErrors bool
	ran      []*auditStep // have run in any case
	maybe    []*auditStep // may have run
	beside   []*auditStep // the list that the step is in
}

// eachStep calls f for each step of the configuration, outer ones first.
func (c *auditConfig) eachStep(f func(*auditStep, *auditCourse)) {
	for _, site := range c.sites {
		walk(site.steps, auditCourse{site: site}, f)
		walk(site.errorRoutes, auditCourse{site: site, inErrors: true}, f)
	}
}

func walk(steps []*auditStep, course auditCourse, f func(*auditStep, *auditCourse)) {
	ran, maybe := slices.Clip(course.ran), slices.Clip(course.maybe)
	grouped := make(map[string][]*auditStep)
	for _, s := range steps {
		here := course
		here.ran, here.maybe, here.beside = ran, slices.Clip(maybe), steps
		if here.hosts == "" {
			here.hosts = s.hosts
		}
		for group, others := range grouped {
			if group != s.group {
				here.maybe = append(here.maybe, others...)
			}
		}
		f(s, &here)
		inner := here
		inner.ran = append(slices.Clip(here.ran), s)
		walk(s.children, inner, f)
		outer := here
		outer.inErrors = true
		walk(s.onError, outer, f)

		sure, possible := s.run()
		switch {
		case s.group != "" && sharesGroup(s, steps):
			grouped[s.group] = append(grouped[s.group], append(sure, possible...)...)
		default:
			ran = append(ran, sure...)
			maybe = append(maybe, possible...)
		}
	}
}

// run lists what will have run once the step is passed: in any case, and
// possibly.
func (s *auditStep) run() (sure, possible []*auditStep) {
	if s.leavesTrace() {
		sure = []*auditStep{s}
	}
	for _, child := range s.children {
		more, perhaps := child.run()
		if s.isProxy() || child.group != "" && sharesGroup(child, s.children) {
			// those of a proxy run on its response
			more, perhaps = nil, append(more, perhaps...)
		}
		sure, possible = append(sure, more...), append(possible, perhaps...)
	}
	if len(s.matchers) > 0 {
		return nil, append(sure, possible...)
	}
	return sure, possible
}

// leavesTrace says whether it matters to later steps that this one has run.
func (s *auditStep) leavesTrace() bool {
	return s.edge != nil || s.limiter != nil || len(s.writes) > 0 || s.authenticates()
}

func sharesGroup(s *auditStep, steps []*auditStep) bool {
	return slices.ContainsFunc(steps, func(other *auditStep) bool { return other != s && other.group == s.group })
}

// resolved is the edge_limit that every request here has passed, or nil.
func (c *auditCourse) resolved() *auditEdge {
	for _, s := range c.ran {
		if s.edge != nil {
			return s.edge
		}
	}
	return nil
}

// rewritten says whether the remote address is the client's here, and identity
// headers are gone.
func (c *auditConfig) rewritten(course *auditCourse) bool {
	edge := course.resolved()
	return edge != nil && !c.forwardOff(edge)
}

// forwardOff says whether the block leaves headers and remote address alone.
func (c *auditConfig) forwardOff(e *auditEdge) bool {
	forward := e.Forward
	if forward == nil && c.app != nil {
		forward = c.app.Forward
	}
	return len(forward) == 1 && forward[0] == forwardOff
}

// client is how the block finds the client, and the block that says so. Both are
// nil if nothing does.
func (c *auditConfig) client(e *auditEdge) (*Client, *auditEdge) {
	switch {
	case e.Client != nil:
		return e.Client, e
	case c.app != nil && c.app.Client != nil:
		return c.app.Client, c.app
	}
	return nil, nil
}

// trustsAnybody says whether the client can be another than the peer.
func (c *auditConfig) trustsAnybody(e *auditEdge, server *auditServer) bool {
	client, _ := c.client(e)
	switch {
	case client == nil:
		return server.trusts()
	case client.Connection:
		return false
	}
	return client.trustsProxies() || client.Proof != nil || server.trusts()
}

func (c *Client) trustsProxies() bool { return len(c.TrustedProxiesRaw) > 0 || c.TrustedProxiesUnix }

// unresolvedOption is what happens to clients that cannot be resolved.
func (c *auditConfig) unresolvedOption(e *auditEdge) string {
	if c.app != nil {
		return cmp.Or(e.Unresolved, c.app.Unresolved, unresolvedShare)
	}
	return cmp.Or(e.Unresolved, unresolvedShare)
}

// budgets are those of the block and those that it uses by name.
func (c *auditConfig) budgets(e *auditEdge) (limits []*Limit, inFlight []*InFlight, ceilings []*Ceiling) {
	limits, inFlight, ceilings = slices.Clone(e.limits), slices.Clone(e.inFlight), slices.Clone(e.ceilings)
	if c.app == nil {
		return limits, inFlight, ceilings
	}
	for _, l := range c.app.limits {
		if slices.Contains(e.use, l.Name) {
			limits = append(limits, l)
		}
	}
	for _, f := range c.app.inFlight {
		if slices.Contains(e.use, f.Name) {
			inFlight = append(inFlight, f)
		}
	}
	for _, ceiling := range c.app.ceilings {
		if slices.Contains(e.use, ceiling.Name) {
			ceilings = append(ceilings, ceiling)
		}
	}
	return limits, inFlight, ceilings
}

// spotOf is where a budget is defined: in the block, or in the global one.
func (c *auditConfig) spotOf(e *auditEdge, name string) spot {
	if at, ok := e.spots["name:"+name]; ok {
		return at
	}
	if c.app != nil {
		if at, ok := c.app.spots["name:"+name]; ok {
			return at
		}
	}
	return e.spot
}
