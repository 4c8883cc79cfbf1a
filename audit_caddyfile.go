package edgelimit

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

// caddyfileAudit reads a Caddyfile by its tokens: nothing in it is adapted, so
// directives and modules of other plugins do no harm.
type caddyfileAudit struct {
	config *auditConfig
	order  []string
	routes map[string][]*auditNode // named ones
	site   *auditSite
	// invoking are the named routes that are being read, and invoked is how many
	// were: those that invoke each other could go on for ever.
	invoking []string
	invoked  int

	httpPort, httpsPort string
	bind                []string
}

// readCaddyfile reads a Caddyfile into the form that the rules judge.
func readCaddyfile(filename string, content []byte) (*auditConfig, error) {
	blocks, unset, err := parseBlocks(filename, content)
	if err != nil {
		return nil, err
	}
	c := &caddyfileAudit{
		config:    new(auditConfig),
		order:     slices.Clone(directiveOrder),
		routes:    make(map[string][]*auditNode),
		httpPort:  "80",
		httpsPort: "443",
	}
	if len(unset) > 0 {
		c.config.remarks = append(c.config.remarks, finding{
			ID: ruleUnsetVariable, Severity: severityNote, spot: spot{File: shortPath(filename)},
			Message: "environment variables are not set here: " + strings.Join(unset, ", ") + "; what depends on them is not judged",
			Mend:    "set them as they are in production, if they matter",
		})
	}
	sites, err := c.readBlocks(blocks)
	if err != nil {
		return nil, err
	}
	for _, site := range sites {
		c.readSite(site)
	}
	return c.config, nil
}

// siteBlock is a site before it is read.
type siteBlock struct {
	keys  []caddyfile.Token
	nodes []*auditNode
}

// readBlocks reads the global options, takes down the named routes, and makes
// trees of the sites.
func (c *caddyfileAudit) readBlocks(blocks []caddyfile.ServerBlock) (sites []siteBlock, err error) {
	shorthands := httpcaddyfile.NewShorthandReplacer()
	for i, b := range blocks {
		for _, key := range b.Keys {
			if isBrace(key, "}") {
				return nil, fmt.Errorf("this brace closes nothing, at %s", spotOfToken(key))
			}
		}
		var nodes []*auditNode
		for _, segment := range b.Segments {
			segment = slices.Clone(segment)
			shorthands.ApplyToSegment(&segment)
			read, err := readNodes(segment, 0)
			if err != nil {
				return nil, err
			}
			nodes = append(nodes, read...)
		}
		switch {
		case b.IsNamedRoute:
			if len(nodes) > 0 {
				c.routes[b.Keys[0].Text] = nodes[0].children
			}
		case len(b.Keys) > 0:
			sites = append(sites, siteBlock{b.Keys, nodes})
		case i == 0:
			c.readGlobals(nodes)
		case len(nodes) > 0:
			return nil, fmt.Errorf("a block without an address holds global options, and those must come first, at %s", nodes[0].spot)
		}
	}
	return sites, nil
}

func (c *caddyfileAudit) readSite(b siteBlock) {
	site := &auditSite{spot: spotOfToken(b.keys[0])}
	c.site = site
	c.config.sites = append(c.config.sites, site)
	binds := c.bind
	for _, n := range b.nodes {
		switch n.name {
		case "bind":
			binds = n.args
		case "log":
			site.logs = append(site.logs, c.siteLog(n))
		}
	}
	var names []string
	for _, key := range b.keys {
		names = append(names, key.Text)
		host, listeners := c.readKey(key.Text, binds)
		site.hosts = append(site.hosts, host)
		site.listen = append(site.listen, listeners...)
	}
	site.name = strings.Join(names, ", ")
	site.server = c.config.serverOf(site)
	site.steps = c.steps(b.nodes, nil, true)
}

// readKey reads a site's address: its host, and what it listens on as Caddy
// names that.
func (c *caddyfileAudit) readKey(key string, binds []string) (host string, listeners []string) {
	address, err := httpcaddyfile.ParseAddress(key)
	if err != nil {
		return "", nil
	}
	port := c.httpsPort
	switch {
	case address.Port != "":
		port = address.Port
	case address.Scheme == "http":
		port = c.httpPort
	}
	if len(binds) == 0 {
		binds = []string{""}
	}
	for _, bind := range binds {
		if strings.Contains(bind, "/") { // a network of its own, or a socket
			listeners = append(listeners, bind)
		} else {
			listeners = append(listeners, net.JoinHostPort(bind, port))
		}
	}
	return address.Host, listeners
}

// serverOf finds the server options that hold for a site, as Caddy does.
func (c *auditConfig) serverOf(site *auditSite) *auditServer {
	var general *auditServer
	for _, server := range c.servers {
		switch {
		case slices.Contains(site.listen, server.listener):
			return server
		case server.listener == "":
			general = server
		}
	}
	return general
}

// steps reads the directives of a block, in the order in which they run. Named
// matchers hold for the block and what is in it.
func (c *caddyfileAudit) steps(nodes []*auditNode, outer map[string][]auditMatcher, sorted bool) []*auditStep {
	matchers := make(map[string][]auditMatcher, len(outer))
	for name, set := range outer {
		matchers[name] = set
	}
	for _, n := range nodes {
		if strings.HasPrefix(n.name, "@") {
			matchers[n.name] = n.matcherSet()
		}
	}
	var steps []*auditStep
	for _, n := range nodes {
		switch {
		case strings.HasPrefix(n.name, "@"), n.name == "log", n.name == "bind", n.name == "tls":
		case n.name == "handle_errors":
			c.site.errorRoutes = append(c.site.errorRoutes, &auditStep{
				spot: n.spot, name: n.name, children: c.steps(n.children, matchers, true),
			})
		default:
			steps = append(steps, c.step(n, matchers))
		}
	}
	if sorted {
		slices.SortStableFunc(steps, func(a, b *auditStep) int {
			return slices.Index(c.order, a.name) - slices.Index(c.order, b.name)
		})
	}
	return steps
}

func (c *caddyfileAudit) step(n *auditNode, matchers map[string][]auditMatcher) *auditStep {
	s := &auditStep{spot: n.spot, name: modernNames[n.name]}
	if s.name == "" {
		s.name = n.name
	}
	if len(n.args) > 0 {
		s.matchers = matcherArgument(n.args[0], n.spot, matchers)
	}
	switch s.name {
	case "handle":
		s.group = "handle"
		s.children = c.steps(n.children, matchers, true)
	case "route":
		s.children = c.steps(n.children, matchers, false)
	case "invoke":
		s.children = c.invoke(lastOf(n.args))
	case "edge_limit":
		s.edge, s.matchers = c.readEdge(n, matchers), nil
	case "rate_limit":
		s.limiter = limiterOfNode(n)
	case "request_header":
		args := n.args
		if len(args) > 0 && isMatcherArgument(args[0]) {
			args = args[1:]
		}
		s.addWrite(args, n.spot)
	default:
		c.readOther(s, n, matchers)
	}
	return s
}

// maxInvocations bounds how many named routes are read into others.
const maxInvocations = 1000

// invoke reads a named route in the place where it runs.
func (c *caddyfileAudit) invoke(name string) (steps []*auditStep) {
	nodes, ok := c.routes[name]
	if !ok || slices.Contains(c.invoking, name) || c.invoked == maxInvocations {
		return nil
	}
	c.invoked++
	c.invoking = append(c.invoking, name)
	steps = c.steps(nodes, nil, true)
	c.invoking = c.invoking[:len(c.invoking)-1]
	return steps
}

// modernNames are those of directives that Caddy renamed, or sorts alike.
var modernNames = map[string]string{"basicauth": "basic_auth", "skip_log": "log_skip", "handle_path": "handle"}

func lastOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[len(args)-1]
}

// readOther reads a directive of which only texts, header operations and nested
// routes matter.
func (c *caddyfileAudit) readOther(s *auditStep, n *auditNode, matchers map[string][]auditMatcher) {
	special := func(child *auditNode) bool { return child.name == "handle_response" }
	for _, child := range n.children {
		if special(child) {
			s.children = append(s.children, &auditStep{
				spot: child.spot, name: child.name, children: c.steps(child.children, matchers, true),
			})
		}
	}
	if s.isProxy() {
		s.proxy = proxyOfNode(n)
		for _, child := range n.children {
			switch child.name {
			case "header_up":
				s.addWrite(child.args, child.spot)
			case "copy_headers": // of forward_auth: what its answer says
				child.everyText(func(text string, at spot) {
					_, renamed, isRenamed := strings.Cut(text, ">")
					if !isRenamed {
						renamed = text
					}
					s.writes = append(s.writes, auditWrite{spot: at, name: renamed})
				}, nil)
			}
		}
		special = func(child *auditNode) bool {
			return child.name == "handle_response" || child.name == "header_up" && s.writesAt(child.spot)
		}
	}
	n.everyText(func(text string, at spot) {
		if strings.Contains(text, "{") {
			s.texts = append(s.texts, auditText{at, text})
		}
	}, special)
}

// addWrite reads an operation on request headers: [+|-]<field> [<value>
// [<replacement>]].
func (s *auditStep) addWrite(args []string, at spot) {
	if len(args) == 0 {
		return
	}
	field := strings.TrimSuffix(args[0], ":")
	w := auditWrite{spot: at, name: strings.TrimLeft(field, "+-"), deletes: strings.HasPrefix(field, "-"), value: strings.Join(args[1:], " ")}
	s.writes = append(s.writes, w)
}

// writesAt says whether the line is known as a write to an identity header,
// which has rules of its own.
func (s *auditStep) writesAt(at spot) bool {
	return slices.ContainsFunc(s.writes, func(w auditWrite) bool { return w.spot == at && isIdentityHeader(w.name) })
}

func proxyOfNode(n *auditNode) *auditProxy {
	p := new(auditProxy)
	for _, child := range n.children {
		switch child.name {
		case "trusted_proxies":
			p.trusted = append(p.trusted, auditRanges{spot: child.spot, source: "static", ranges: child.args})
		case "lb_policy":
			if len(child.args) > 1 && child.args[0] == "header" {
				p.lbHeader, p.lbSpot = child.args[1], child.spot
			}
		case "transport":
			if line := child.child("proxy_protocol"); line != nil {
				p.proxyProtocol = &line.spot
			}
		case "replace_status", "handle_response":
			p.ownResponse = true
		}
	}
	return p
}

// directiveOrder is the order in which Caddy sorts its directives, and ours
// among them. That of other plugins cannot be asked for: of rate_limit it is
// known.
var directiveOrder = strings.Fields(`
	tracing map vars fs root log_append log_skip log_name log_level header
	copy_response_headers request_body timeouts edge_limit edge_limit_probe redir
	method rewrite uri try_files rate_limit basic_auth forward_auth request_header
	encode push intercept templates invoke handle route abort error
	copy_response respond metrics reverse_proxy php_fastcgi file_server acme_server`)
