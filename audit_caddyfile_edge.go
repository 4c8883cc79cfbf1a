package edgelimit

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// readEdge reads an edge_limit block, the directive or the global option. What
// the block's own parser can read it reads; matchers, and modules that this
// binary may not have, are taken out before.
func (c *caddyfileAudit) readEdge(n *auditNode, matchers map[string][]auditMatcher) *auditEdge {
	e := &auditEdge{spot: n.spot, spots: make(map[string]spot)}
	args := n.args
	if len(args) > 0 && isMatcherArgument(args[0]) {
		e.matchers = matcherArgument(args[0], n.spot, matchers)
		e.match = matchText(e.matchers)
		args = args[1:]
	}
	e.use = args
	for _, child := range n.children {
		var err error
		switch child.name {
		case "limit", "ceiling", "in_flight":
			err = e.readBudget(child, matchers)
		case "client":
			e.spots["client"] = child.spot
			err = e.readClient(child)
		case "pepper":
			e.spots["pepper"] = child.spot
			e.pepper = lastOf(child.args)
		case "store":
			for _, option := range child.children {
				if option.name == "password" {
					e.spots["store_password"] = option.spot
					e.storePassword = lastOf(option.args)
				}
			}
		case "ipv4_prefix", "ipv6_prefix", "max_keys", "persist":
		default:
			err = e.readOption(child)
		}
		c.reportInvalid(child, err)
	}
	c.config.checkUse(e)
	return e
}

// reportInvalid reports what edge_limit will refuse to load, unless that may be
// because a variable is not set here.
func (c *caddyfileAudit) reportInvalid(n *auditNode, err error) {
	if err == nil {
		return
	}
	unset := false
	n.everyText(func(text string, _ spot) { unset = unset || strings.Contains(text, unsetPrefix) }, nil)
	if !unset {
		c.config.invalid(n.spot, err)
	}
}

// misplaced finds the word that stands where a proof's header should: it may be
// the secret.
var misplaced = regexp.MustCompile(`proof: (client_header )?"(\\.|[^"\\])*"`)

// invalid reports an error of the configuration.
func (c *auditConfig) invalid(at spot, err error) {
	c.remarks = append(c.remarks, finding{
		ID: ruleInvalid, Severity: severityError, spot: at,
		Message: "edge_limit will refuse this: " + misplaced.ReplaceAllString(err.Error(), "proof: what stands there"),
		Mend:    "see what the message says; caddy validate tries the whole configuration",
	})
}

// checkUse reports names that nothing defines.
func (c *auditConfig) checkUse(e *auditEdge) {
	for _, name := range e.use {
		known := c.app != nil && c.app.spots["name:"+name] != (spot{})
		if !known && !strings.Contains(name, unsetPrefix) {
			c.invalid(e.spot, unknownNameError(name))
		}
	}
}

// dispense makes a dispenser that stands on the first token.
func dispense(tokens []caddyfile.Token) *caddyfile.Dispenser {
	d := caddyfile.NewDispenser(tokens)
	d.Next()
	return d
}

// readBudget reads a limit, a ceiling or an in_flight.
func (e *auditEdge) readBudget(n *auditNode, matchers map[string][]auditMatcher) error {
	b := block{Dispenser: dispense(n.without("match", "exempt"))}
	name, _, err := b.definition(&e.limits, &e.inFlight, &e.ceilings, nil)
	if name == "" {
		return err
	}
	e.spots["name:"+name] = n.spot
	var set []auditMatcher
	if line := n.child("match"); line != nil {
		if set = matchersIn(line.children); len(line.args) > 0 {
			set = matcherArgument(line.args[0], line.spot, matchers)
		}
	}
	e.matchers = append(slices.Clip(e.matchers), set...)
	match := matchText(set)
	switch n.name {
	case "limit":
		l := e.limits[len(e.limits)-1]
		l.match, l.exempted = match, n.child("exempt") != nil
	case "ceiling":
		e.ceilings[len(e.ceilings)-1].match = match
	case "in_flight":
		e.inFlight[len(e.inFlight)-1].match = match
	}
	return err
}

// readClient reads how the client is found.
func (e *auditEdge) readClient(n *auditNode) error {
	tokens := slices.Clone(n.tokens[:min(n.head+1, len(n.tokens))])
	sources := 0
	for i, child := range n.children {
		e.spots[child.name] = child.spot
		if child.name != "trusted_proxies" {
			tokens = append(tokens, child.tokens...)
			continue
		}
		e.spots[child.name+sourceIndex(sources)] = child.spot
		sources++
		if len(child.args) > 0 && isForeignSource(child.args[0]) {
			tokens = append(tokens, standIn(i)...)
		} else {
			tokens = append(tokens, child.tokens...)
		}
	}
	if len(n.tokens) > n.head {
		tokens = append(tokens, n.tokens[len(n.tokens)-1])
	}
	e.Client = new(Client)
	return e.Client.unmarshalCaddyfile(dispense(tokens))
}

// isForeignSource says whether a source of ranges may be a module that this
// binary does not have.
func isForeignSource(name string) bool {
	if name == "private_ranges" || strings.ContainsAny(name, ".:/") {
		return false
	}
	_, err := caddy.GetModule("http.ip_sources." + name)
	return err != nil
}

// standIn is a line that trusts an address of no use (RFC 5737), in the place
// of a source that cannot be loaded. Having no file, it is a line of its own.
func standIn(line int) []caddyfile.Token {
	return []caddyfile.Token{{Line: line, Text: "trusted_proxies"}, {Line: line, Text: "static"}, {Line: line, Text: "192.0.2.0"}}
}

// sourceIndex tells the sources of trusted proxies apart in spots.
func sourceIndex(i int) string { return "[" + strconv.Itoa(i) + "]" }

// readOption reads an option that the directive and the global option share.
func (e *auditEdge) readOption(n *auditNode) error {
	b := block{Dispenser: dispense(n.tokens)}
	known, err := e.unmarshalOption(&b)
	if err == nil && !known {
		return placef(b.Dispenser, "unrecognized subdirective %q", n.name)
	}
	return err
}
