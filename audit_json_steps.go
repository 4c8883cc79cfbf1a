package edgelimit

import (
	"fmt"
	"slices"
	"strings"
)

// steps reads a list of routes.
func (c *jsonAudit) steps(routes auditValue) (steps []*auditStep) {
	for _, route := range routes.items() {
		steps = append(steps, c.route(route))
	}
	return steps
}

func (c *jsonAudit) route(v auditValue) *auditStep {
	s := &auditStep{
		spot: v.place, name: "route", group: v.get("group").text(),
		matchers: v.get("match").matchers(),
	}
	for _, m := range s.matchers {
		if m.name == "host" {
			s.hosts = strings.Join(m.args, " ")
		}
	}
	for _, handler := range v.get("handle").items() {
		s.children = append(s.children, c.step(handler))
	}
	return s
}

// directiveOfHandler are the handlers whose directives have other names.
var directiveOfHandler = map[string]string{
	"authentication":  "basic_auth",
	"static_response": "respond",
	"headers":         "header",
}

func (c *jsonAudit) step(v auditValue) *auditStep {
	s := &auditStep{spot: v.place, name: v.get("handler").text()}
	if name, ok := directiveOfHandler[s.name]; ok {
		s.name = name
	}
	var read []string // members that were read here
	switch s.name {
	case "subroute":
		s.children, s.onError = c.steps(v.get("routes")), c.steps(v.get("errors", "routes"))
		read = []string{"routes", "errors"}
	case "invoke":
		s.children = c.invoke(v.get("name").text())
	case "edge_limit":
		s.edge = c.readHandler(v)
		return s
	case "rate_limit":
		s.limiter = limiterOfJSON(v)
		return s
	case "header":
		s.addWrites(v.get("request"))
		read = []string{"request"}
	case "reverse_proxy":
		s.proxy = proxyOfJSON(v)
		s.addWrites(v.get("headers", "request"))
		for _, response := range v.get("handle_response").items() {
			s.children = append(s.children, c.steps(response.get("routes"))...)
		}
		read = []string{"handle_response"}
	case "intercept":
		for _, response := range v.get("handle_response").items() {
			s.children = append(s.children, c.steps(response.get("routes"))...)
		}
		read = []string{"handle_response"}
	}
	s.addTexts(v, read)
	return s
}

// invoke reads a named route in the place where it runs.
func (c *jsonAudit) invoke(name string) []*auditStep {
	route := c.routes.get(name)
	if !route.exists() || slices.Contains(c.invoking, name) || c.invoked == maxInvocations {
		return nil
	}
	c.invoked++
	c.invoking = append(c.invoking, name)
	s := c.route(route)
	c.invoking = c.invoking[:len(c.invoking)-1]
	return []*auditStep{s}
}

// addTexts takes down the texts in which placeholders can stand, but for the
// members that are read elsewhere.
func (s *auditStep) addTexts(v auditValue, except []string) {
	for _, member := range v.members() {
		if slices.Contains(except, member.name) {
			continue
		}
		member.everyText(func(text auditValue) {
			if strings.Contains(text.text(), "{") && !s.writesAt(text.place) {
				s.texts = append(s.texts, auditText{text.place, text.text()})
			}
		})
	}
}

// addWrites reads operations on request headers.
func (s *auditStep) addWrites(v auditValue) {
	for _, operation := range []string{"add", "set"} {
		for _, field := range v.get(operation).members() {
			for _, value := range field.items() {
				s.writes = append(s.writes, auditWrite{spot: value.place, name: field.name, value: value.text()})
			}
		}
	}
	for _, name := range v.get("delete").items() {
		s.writes = append(s.writes, auditWrite{spot: name.place, name: name.text(), deletes: true})
	}
	for _, field := range v.get("replace").members() {
		for _, replacement := range field.items() {
			value := replacement.get("replace")
			s.writes = append(s.writes, auditWrite{spot: value.place, name: field.name, value: value.text()})
		}
	}
}

func proxyOfJSON(v auditValue) *auditProxy {
	p := &auditProxy{ownResponse: v.get("handle_response").exists()}
	if trusted := v.get("trusted_proxies"); trusted.exists() {
		p.trusted = []auditRanges{{spot: trusted.place, source: "static", ranges: trusted.strings()}}
	}
	if protocol := v.get("transport", "proxy_protocol"); protocol.text() != "" {
		at := protocol.place
		p.proxyProtocol = &at
	}
	if policy := v.get("load_balancing", "selection_policy"); policy.get("policy").text() == "header" {
		p.lbHeader, p.lbSpot = policy.get("field").text(), policy.get("field").place
	}
	return p
}

// readApp reads the app that the global option stands for.
func (c *jsonAudit) readApp(v auditValue) *auditEdge {
	app := new(App)
	if err := v.into(app); err != nil {
		c.config.invalid(v.place, err)
	}
	e := c.newEdge(v, app.Options, app.Limits, app.InFlight, app.Ceilings)
	e.pepper, e.spots["pepper"] = app.Pepper, v.get("pepper").place
	password := v.get("store", "password")
	e.storePassword, e.spots["store_password"] = password.text(), password.place
	return e
}

// readHandler reads an edge_limit handler.
func (c *jsonAudit) readHandler(v auditValue) *auditEdge {
	h := new(Handler)
	if err := v.into(h); err != nil {
		c.config.invalid(v.place, err)
	}
	e := c.newEdge(v, h.Options, h.Limits, h.InFlight, h.Ceilings)
	e.matchers = append(v.get("match").matchers(), e.matchers...)
	e.match, e.use = matchText(v.get("match").matchers()), h.Use
	c.config.checkUse(e)
	return e
}

func (c *jsonAudit) newEdge(v auditValue, options Options, limits []*Limit, inFlight []*InFlight, ceilings []*Ceiling) *auditEdge {
	e := &auditEdge{spot: v.place, Options: options, spots: make(map[string]spot)}
	if err := e.Options.validate(); err != nil {
		c.config.invalid(v.place, err)
	}
	if client := v.get("client"); client.exists() {
		e.spots["client"] = client.place
		for _, member := range client.members() {
			e.spots[member.name] = member.place
		}
		for i, source := range client.get("trusted_proxies").items() {
			e.spots["trusted_proxies"+sourceIndex(i)] = source.place
		}
	}
	define := func(kind string, i int, name string, err error) {
		defined := v.get(kind).items()[i]
		at := defined.place
		e.spots["name:"+name] = at
		e.matchers = append(e.matchers, defined.get("match").matchers()...)
		if err != nil {
			c.config.invalid(at, fmt.Errorf("%s: %w", name, err))
		}
	}
	for i, l := range limits {
		if l != nil {
			e.limits = append(e.limits, l)
			define("limits", i, l.Name, l.validate())
		}
	}
	for i, f := range inFlight {
		if f != nil {
			e.inFlight = append(e.inFlight, f)
			define("in_flight", i, f.Name, f.validate())
		}
	}
	for i, ceiling := range ceilings {
		if ceiling != nil {
			e.ceilings = append(e.ceilings, ceiling)
			define("ceilings", i, ceiling.Name, ceiling.validate())
		}
	}
	return e
}
