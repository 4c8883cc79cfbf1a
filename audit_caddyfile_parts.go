package edgelimit

import (
	"slices"
	"strings"
)

// isMatcherArgument says whether a directive's first argument selects requests.
func isMatcherArgument(arg string) bool {
	return arg == "*" || strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, "@")
}

// matcherArgument is the matcher that an argument stands for; none if it is
// something else, or *.
func matcherArgument(arg string, at spot, known map[string][]auditMatcher) []auditMatcher {
	switch {
	case strings.HasPrefix(arg, "/"):
		return []auditMatcher{{spot: at, name: "path", args: []string{arg}}}
	case strings.HasPrefix(arg, "@"):
		if set, ok := known[arg]; ok {
			return set
		}
		return []auditMatcher{{spot: at, name: arg}} // defined nowhere: Caddy will say so
	}
	return nil
}

// matcherSet reads a definition: @name <matcher>, or @name { <matchers> }.
func (n *auditNode) matcherSet() []auditMatcher {
	if n.head < 2 {
		return matchersIn(n.children)
	}
	if n.tokens[1].Quoted() {
		return []auditMatcher{{spot: n.spot, name: "expression", args: n.args}}
	}
	return []auditMatcher{newMatcher(n.spot, n.args[0], n.args[1:], n.children)}
}

func matchersIn(nodes []*auditNode) (matchers []auditMatcher) {
	for _, n := range nodes {
		matchers = append(matchers, newMatcher(n.spot, n.name, n.args, n.children))
	}
	return matchers
}

func newMatcher(at spot, name string, args []string, block []*auditNode) auditMatcher {
	m := auditMatcher{spot: at, name: name, args: args}
	switch {
	case name == "not" && len(args) > 0:
		m.args, m.inner = nil, []auditMatcher{newMatcher(at, args[0], args[1:], block)}
	case name == "not":
		m.inner = matchersIn(block)
	case name == "header" && len(args) > 0:
		m.fields = args[:1]
	case name == "header_regexp" && len(args) > 1: // a name for the match may come first
		m.fields = args[:len(args)-1]
	default:
		// other blocks are more arguments: vars, file, header_regexp ...
		for _, n := range block {
			n.everyText(func(text string, _ spot) { m.args = append(m.args, text) }, nil)
			m.args = append(m.args, n.name)
		}
	}
	return m
}

// readGlobals reads the global options.
func (c *caddyfileAudit) readGlobals(nodes []*auditNode) {
	for _, n := range nodes {
		switch n.name {
		case "http_port":
			c.httpPort = lastOf(n.args)
		case "https_port":
			c.httpsPort = lastOf(n.args)
		case "default_bind":
			c.bind = append(c.bind, n.args...)
		case "order":
			c.reorder(n.args)
		case "servers":
			c.config.servers = append(c.config.servers, serverOfNode(n))
		case "log":
			if name := lastOf(n.args); name == "" || name == "default" {
				c.config.errorLog = logOfNode(n)
			}
		case "edge_limit":
			c.config.app = c.readEdge(n, nil)
		}
	}
}

// reorder does what the option order says: <directive> first|last|before|after
// [<directive>].
func (c *caddyfileAudit) reorder(args []string) {
	if len(args) < 2 {
		return
	}
	rest := slices.DeleteFunc(slices.Clone(c.order), func(name string) bool { return name == args[0] })
	at := len(rest)
	switch args[1] {
	case "first":
		at = 0
	case "before", "after":
		if at = slices.Index(rest, lastOf(args)); at < 0 {
			return
		}
		if args[1] == "after" {
			at++
		}
	}
	c.order = slices.Insert(rest, at, args[0])
}

func serverOfNode(n *auditNode) *auditServer {
	s := &auditServer{listener: lastOf(n.args)}
	for _, child := range n.children {
		switch child.name {
		case "trusted_proxies":
			s.trusted = append(s.trusted, rangesOfNode(child))
			s.spot = child.spot
		case "trusted_proxies_unix":
			s.unix = true
			if len(s.trusted) == 0 {
				s.spot = child.spot
			}
		case "trusted_proxies_strict":
			s.strict = true
		case "client_ip_headers":
			s.headers = append(s.headers, child.args...)
		case "log_credentials":
			s.logCredentials = true
		case "listener_wrappers":
			if wrapper := child.child("proxy_protocol"); wrapper != nil {
				s.proxyProtocol = proxyProtocolOfNode(wrapper)
			}
		}
	}
	return s
}

// rangesOfNode reads trusted_proxies <module> <args...>.
func rangesOfNode(n *auditNode) auditRanges {
	r := auditRanges{spot: n.spot}
	if len(n.args) > 0 {
		r.source, r.ranges = n.args[0], n.args[1:]
	}
	return r
}

// proxyProtocolOfNode reads who may say where a connection comes from.
func proxyProtocolOfNode(n *auditNode) (sources []auditRanges) {
	for _, child := range n.children {
		switch child.name {
		case "allow":
			sources = append(sources, auditRanges{spot: child.spot, source: "static", ranges: child.args})
		case "fallback_policy":
			if usesAnyProxyHeader(lastOf(child.args)) {
				sources = append(sources, auditRanges{spot: child.spot, source: "fallback_policy", everyone: true})
			}
		}
	}
	return sources
}

// usesAnyProxyHeader says whether a fallback policy believes PROXY headers from
// addresses that no list names.
func usesAnyProxyHeader(policy string) bool {
	return strings.EqualFold(policy, "use") || strings.EqualFold(policy, "require")
}

// logOfNode reads the filter of a log, if it has one.
func logOfNode(n *auditNode) auditLog {
	l := auditLog{spot: n.spot}
	if format := n.child("format"); format != nil && len(format.args) > 0 && format.args[0] == "filter" {
		for _, field := range format.children {
			if field.name == "fields" {
				l.addFilters(field.children)
			} else {
				l.addFilters([]*auditNode{field})
			}
		}
	}
	if output := n.child("output"); output != nil && lastOf(output.args) == "discard" {
		l.filtered = append(l.filtered, "request")
	}
	return l
}

func (l *auditLog) addFilters(fields []*auditNode) {
	for _, field := range fields {
		if len(field.args) > 0 && field.args[0] != "rename" {
			l.filtered = append(l.filtered, field.name)
		}
	}
}

// siteLog reads the log of a site. Without a format and an output of its own it
// writes to Caddy's default log.
func (c *caddyfileAudit) siteLog(n *auditNode) auditLog {
	l := logOfNode(n)
	if n.child("format") == nil && n.child("output") == nil {
		l.filtered = append(l.filtered, c.config.errorLog.filtered...)
	}
	return l
}
