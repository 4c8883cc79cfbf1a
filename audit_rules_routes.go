package edgelimit

import "slices"

// judgeErrorRoutes finds error routes that proxy in sites with edge_limit: those
// that have none themselves, since they start with the request as it came, and
// those that answer with another status.
func (a *audit) judgeErrorRoutes() {
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		if !course.inErrors || !s.isProxy() || !a.limits(course.site, course.hosts) {
			return
		}
		if s.proxy != nil && !s.proxy.ownResponse {
			a.report(severityNote, ruleErrorRouteStatus, s.spot, "write replace_status {err.status_code} into it",
				"this error route proxies and answers with the status that its upstream gives: what was denied may come out as 200")
		}
		if course.resolved() != nil {
			return
		}
		a.report(severityWarning, ruleErrorRouteProxy, s.spot, "put a bare edge_limit before it; nothing is charged twice",
			"this error route proxies without an edge_limit: the upstream is told the proxy's address, and after some errors gets the headers as the caller sent them")
	})
}

// limits says whether the site has an edge_limit for one of the hosts; "" is all.
func (a *audit) limits(site *auditSite, hosts string) (found bool) {
	walk(site.steps, auditCourse{site: site}, func(s *auditStep, course *auditCourse) {
		found = found || s.edge != nil && (hosts == "" || course.hosts == "" || course.hosts == hosts)
	})
	return found
}

// judgeProxies finds proxies that a request reaches without edge_limit. Where
// nothing uses it at all, one note is enough.
func (a *audit) judgeProxies() {
	used := false
	a.edges(func(*auditEdge, *auditCourse) { used = true })
	type where struct {
		site  *auditSite
		hosts string
	}
	told := make(map[where]bool)
	var first *auditStep
	var sites int
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		if !s.isProxy() || course.inErrors || course.resolved() != nil {
			return
		}
		here := where{course.site, course.hosts}
		before := told[here]
		told[here] = true
		switch {
		case used && a.limits(course.site, course.hosts):
			a.report(severityWarning, ruleNoEdgeLimit, s.spot, "put edge_limit before it: in the same handle, or at the site's level",
				"requests reach this %s without passing the site's edge_limit: nothing limits them here, and the upstream gets their headers as the caller sent them", s.name)
		case before:
		case used:
			a.report(severityWarning, ruleNoEdgeLimit, s.spot, "add edge_limit to the site, without any limit if none is wanted",
				"this site proxies and has no edge_limit, while others have: nothing limits it, and the upstream gets identity headers as the caller sent them")
		default:
			sites++
			if first == nil {
				first = s
			}
		}
	})
	if first != nil {
		a.report(severityNote, ruleNoEdgeLimit, first.spot, "add edge_limit, if callers shall be told apart and limited",
			"nothing here uses edge_limit, though sites proxy (%d of %d): the upstream gets X-Real-IP and the like as the caller sent them", sites, a.countSites())
	}
}

// countSites counts the sites, and in JSON the hosts that a server has routes
// for.
func (a *audit) countSites() int {
	seen := make(map[string]bool)
	a.config.eachStep(func(_ *auditStep, course *auditCourse) {
		seen[course.site.String()+" "+course.hosts] = true
	})
	return len(seen)
}

// judgeProxyProtocol finds upstreams that cannot be dialled for an unresolved
// client.
func (a *audit) judgeProxyProtocol() {
	a.config.eachStep(func(s *auditStep, course *auditCourse) {
		edge := course.resolved()
		if s.proxy == nil || s.proxy.proxyProtocol == nil || edge == nil {
			return
		}
		if a.config.unresolvedOption(edge) != unresolvedDeny && a.config.trustsAnybody(edge, course.site.server) {
			a.report(severityWarning, ruleProxyProtocol, *s.proxy.proxyProtocol, "write unresolved deny into edge_limit, which answers 403 instead",
				"an upstream that speaks the PROXY protocol cannot be told of an unresolved client: Caddy answers 502")
		}
	})
}

// judgeUnusedNames finds global limits that no route uses.
func (a *audit) judgeUnusedNames() {
	if a.config.app == nil {
		return
	}
	var used []string
	a.edges(func(e *auditEdge, _ *auditCourse) { used = append(used, e.use...) })
	unused := func(kind, name string) {
		if name != "" && !slices.Contains(used, name) {
			a.report(severityWarning, ruleUnusedName, a.config.app.at("name:"+name),
				"name it behind edge_limit in a site, or delete it",
				"%s %s is defined, and no route uses it: it limits nothing", kind, name)
		}
	}
	for _, l := range a.config.app.limits {
		unused("limit", l.Name)
	}
	for _, f := range a.config.app.inFlight {
		unused("in_flight", f.Name)
	}
	for _, c := range a.config.app.ceilings {
		unused("ceiling", c.Name)
	}
}
