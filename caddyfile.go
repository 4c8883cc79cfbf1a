package edgelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	httpcaddyfile.RegisterGlobalOption("edge_limit", parseGlobalOption)
	httpcaddyfile.RegisterDirective("edge_limit", parseDirective)
	httpcaddyfile.RegisterDirectiveOrder("edge_limit", httpcaddyfile.Before, "redir")
	httpcaddyfile.RegisterHandlerDirective("edge_limit_probe", parseProbe)
	httpcaddyfile.RegisterDirectiveOrder("edge_limit_probe", httpcaddyfile.Before, "redir")
}

// parseGlobalOption makes the edge_limit app of the global option.
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // the option's name
	if existing != nil {
		return nil, d.Err("edge_limit is set twice in the global options: merge the two blocks")
	}
	app := new(App)
	if err := app.unmarshalCaddyfile(expandShorthands(d)); err != nil {
		return nil, err
	}
	return httpcaddyfile.App{Name: "edge_limit", Value: caddyconfig.JSON(app, nil)}, nil
}

// unmarshalCaddyfile parses the block of the global option. Syntax:
//
//	edge_limit {
//		<options, as in the directive>
//		ipv4_prefix <bits>
//		ipv6_prefix <bits>
//		max_keys    <n>
//		pepper      <secret>
//		limit       <name> <rate> { ... }
//		ceiling     <name> <rate> { ... }
//	}
func (a *App) unmarshalCaddyfile(d *caddyfile.Dispenser) error {
	b := block{Dispenser: d}
	if err := b.end(); err != nil {
		return err
	}
	names := make(map[string]string)
	for b.next() {
		if known, err := a.Options.unmarshalOption(&b); known || err != nil {
			if err != nil {
				return err
			}
			continue
		}
		var err error
		switch b.Val() {
		case "ipv4_prefix":
			err = b.once(func() error { return b.number(&a.IPv4Prefix, 1, 32) })
		case "ipv6_prefix":
			err = b.once(func() error { return b.number(&a.IPv6Prefix, 1, 128) })
		case "max_keys":
			err = b.once(func() error { return b.number(&a.MaxKeys, 1, maxMaxKeys) })
		case "pepper":
			err = b.once(func() error { return b.word(&a.Pepper) })
		case "limit":
			err = a.unmarshalLimit(&b, names)
		case "ceiling":
			err = a.unmarshalCeiling(&b, names)
		default:
			err = b.unrecognized()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (a *App) unmarshalLimit(b *block, names map[string]string) error {
	at := placeOf(b.Dispenser)
	limit, err := unmarshalLimit(b, nil)
	if err != nil {
		return err
	}
	a.Limits = append(a.Limits, limit)
	return b.defineOnce(names, limit.Name, at)
}

func (a *App) unmarshalCeiling(b *block, names map[string]string) error {
	at := placeOf(b.Dispenser)
	ceiling, err := unmarshalCeiling(b, nil)
	if err != nil {
		return err
	}
	a.Ceilings = append(a.Ceilings, ceiling)
	return b.defineOnce(names, ceiling.Name, at)
}

// defineOnce refuses a name that the same block defines twice.
func (b *block) defineOnce(names map[string]string, name, place string) error {
	if before, ok := names[name]; ok {
		return fmt.Errorf("the name %s is defined twice, at %s and at %s: give one of them another name", name, before, place)
	}
	names[name] = place
	return nil
}

// parseDirective makes a handler of the directive. The directive's matcher goes
// into the handler, not the route: it selects what is limited, while resolving
// applies to all.
func parseDirective(h httpcaddyfile.Helper) ([]httpcaddyfile.ConfigValue, error) {
	h.Next() // the directive's name
	handler := new(Handler)
	if err := handler.unmarshalCaddyfile(h); err != nil {
		return nil, err
	}
	return h.NewRoute(nil, handler), nil
}

// unmarshalCaddyfile parses the directive. Syntax:
//
//	edge_limit [<matcher>] [<names defined globally...>] {
//		limit      <name> <rate> { ... }
//		ceiling    <name> <rate> { ... }
//		client     connection | { ... }
//		unresolved share|deny|exempt
//		forward    off | <headers...>
//		strip      <headers...>
//		observe
//	}
func (handler *Handler) unmarshalCaddyfile(h httpcaddyfile.Helper) error {
	d := h.Dispenser
	global, err := globalApp(h)
	if err != nil {
		return err
	}
	if d.CountRemainingArgs() > 0 {
		matcher, ok, err := h.MatcherToken()
		switch {
		case err != nil:
			return place(d, err)
		case !ok:
			d.Prev() // a name
		case matcher != nil:
			handler.MatcherSetsRaw = caddyhttp.RawMatcherSets{matcher}
		}
	}
	for d.NextArg() {
		if global.definitionOf(d.Val()) == "" {
			return place(d, unknownNameError(d.Val()))
		}
		if slices.Contains(handler.Use, d.Val()) {
			return placef(d, "%s is used twice", d.Val())
		}
		handler.Use = append(handler.Use, d.Val())
	}

	b := block{Dispenser: d}
	places := make(map[string]string)
	for b.next() {
		at := placeOf(d)
		if known, err := handler.Options.unmarshalOption(&b); known || err != nil {
			if err != nil {
				return err
			}
			continue
		}
		switch b.Val() {
		case "limit":
			limit, err := unmarshalLimit(&b, &h)
			if err != nil {
				return err
			}
			if err = defineInSite(h, global, limit.Name, limit.defined, at); err != nil {
				return err
			}
			handler.Limits = append(handler.Limits, limit)
			places[limit.Name] = at
		case "ceiling":
			ceiling, err := unmarshalCeiling(&b, &h)
			if err != nil {
				return err
			}
			if err = defineInSite(h, global, ceiling.Name, ceiling.defined, at); err != nil {
				return err
			}
			handler.Ceilings = append(handler.Ceilings, ceiling)
		default:
			return b.unrecognized()
		}
	}
	return handler.checkProvenance(global, places, placeOf(d))
}

// checkProvenance judges the directive as Provision will, to name the line.
func (handler *Handler) checkProvenance(global *App, places map[string]string, place string) error {
	limits, ceilings := slices.Clone(handler.Limits), slices.Clone(handler.Ceilings)
	for _, l := range global.Limits {
		if slices.Contains(handler.Use, l.Name) {
			limits = append(limits, l)
		}
	}
	for _, c := range global.Ceilings {
		if slices.Contains(handler.Use, c.Name) {
			ceilings = append(ceilings, c)
		}
	}
	err := checkProvenance(limits, ceilings)
	var provenance *provenanceError
	if errors.As(err, &provenance) {
		if of, ok := places[provenance.limit]; ok {
			place = of
		}
		return fmt.Errorf("%w, at %s", err, place)
	}
	return err
}

// globalApp is what the global option set, or an empty app.
func globalApp(h httpcaddyfile.Helper) (*App, error) {
	app := new(App)
	option, ok := h.Option("edge_limit").(httpcaddyfile.App)
	if !ok {
		return app, nil
	}
	if err := json.Unmarshal(option.Value, app); err != nil {
		return nil, err
	}
	for _, limit := range app.Limits {
		if err := limit.validate(); err != nil {
			return nil, err
		}
	}
	for _, ceiling := range app.Ceilings {
		if err := ceiling.validate(); err != nil {
			return nil, err
		}
	}
	return app, nil
}

// definitionOf is what a name means globally, or "".
func (a *App) definitionOf(name string) string {
	for _, l := range a.Limits {
		if l.Name == name {
			return l.defined
		}
	}
	for _, c := range a.Ceilings {
		if c.Name == name {
			return c.defined
		}
	}
	return ""
}

// definedAt is where a site defined a name, and as what.
type definedAt struct{ definition, place string }

// defineInSite refuses a second meaning of a name, naming both places.
func defineInSite(h httpcaddyfile.Helper, global *App, name, definition, place string) error {
	const stateName = "edge_limit.definitions"
	definitions, ok := h.State[stateName].(map[string]definedAt)
	if !ok {
		definitions = make(map[string]definedAt)
		h.State[stateName] = definitions
	}
	if g := global.definitionOf(name); g != "" && g != definition {
		return fmt.Errorf("%w, at %s and in the global edge_limit block", conflictError(name), place)
	}
	before, ok := definitions[name]
	if ok && before.definition != definition {
		return fmt.Errorf("%w, at %s and at %s", conflictError(name), before.place, place)
	}
	if !ok {
		definitions[name] = definedAt{definition, place}
	}
	return nil
}

// unmarshalOption parses what the directive and the global option share. known
// says whether the word was one of these.
func (o *Options) unmarshalOption(b *block) (known bool, err error) {
	switch b.Val() {
	case "client":
		err = b.once(func() error {
			o.Client = new(Client)
			return o.Client.unmarshalCaddyfile(b.Dispenser)
		})
	case "unresolved":
		err = b.once(func() error {
			if err := b.word(&o.Unresolved); err != nil {
				return err
			}
			return o.validate()
		})
	case "forward":
		err = b.once(func() error {
			if err := b.words(&o.Forward); err != nil {
				return err
			}
			return validateForward(o.Forward)
		})
	case "strip":
		err = b.once(func() error {
			if err := b.words(&o.Strip); err != nil {
				return err
			}
			return validateHeaderNames("strip", o.Strip)
		})
	case "observe":
		err = b.once(func() error { return b.flag(&o.Observe) })
	default:
		return false, nil
	}
	return true, place(b.Dispenser, err)
}

// unmarshalCaddyfile parses how the client is found. Syntax:
//
//	client connection | {
//		trusted_proxies <module> [<args...>]
//		trusted_proxies_unix
//		header <name>
//		hops <n> [unverified]
//		single_value
//		proof <header> <secret...> {
//			client_header <name>
//		}
//	}
func (c *Client) unmarshalCaddyfile(d *caddyfile.Dispenser) error {
	opening := *d
	if d.NextArg() {
		if d.Val() != "connection" {
			return placef(d, "client %s: write client connection, or a block", d.Val())
		}
		c.Connection = true
		if d.NextArg() {
			return placedError{d.ArgErr()}
		}
	}
	b := block{Dispenser: d}
	empty := true
	for b.next() {
		empty = false
		var err error
		switch b.Val() {
		case "trusted_proxies":
			var source json.RawMessage
			source, err = unmarshalIPSource(d)
			c.TrustedProxiesRaw = append(c.TrustedProxiesRaw, source)
		case "trusted_proxies_unix":
			err = b.once(func() error { return b.flag(&c.TrustedProxiesUnix) })
		case "header":
			err = b.once(func() error { return b.word(&c.Header) })
		case "hops":
			err = b.once(func() error { return c.unmarshalHops(&b) })
		case "single_value":
			err = b.once(func() error { return b.flag(&c.SingleValue) })
		case "proof":
			err = b.once(func() error {
				c.Proof = new(Proof)
				return c.Proof.unmarshalCaddyfile(d)
			})
		default:
			err = b.unrecognized()
		}
		if err != nil {
			return place(d, err)
		}
	}
	if empty && !c.Connection {
		return placef(&opening, "client needs the word connection, or a block that says who is trusted")
	}
	if err := c.validate(); err != nil {
		return place(&opening, fmt.Errorf("client: %w", err))
	}
	return nil
}

func (c *Client) unmarshalHops(b *block) error {
	if !b.NextArg() {
		return placedError{b.ArgErr()}
	}
	n, err := strconv.Atoi(b.Val())
	if err != nil || n < 1 || n > maxHops {
		return fmt.Errorf("hops %q: must be from 1 to %d", b.Val(), maxHops)
	}
	c.Hops = n
	if b.NextArg() {
		if b.Val() != "unverified" {
			return fmt.Errorf("unexpected %q after hops: only the word unverified is possible", b.Val())
		}
		c.Unverified = true
	}
	return b.end()
}

func (p *Proof) unmarshalCaddyfile(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return placedError{d.ArgErr()}
	}
	p.Header = d.Val()
	p.Secrets = d.RemainingArgs()
	if err := p.validate(); err != nil {
		return err
	}
	b := block{Dispenser: d}
	for b.next() {
		if b.Val() != "client_header" {
			return b.unrecognized()
		}
		if err := b.once(func() error { return b.word(&p.ClientHeader) }); err != nil {
			return err
		}
	}
	return nil
}

// unmarshalIPSource parses a module of the http.ip_sources namespace.
func unmarshalIPSource(d *caddyfile.Dispenser) (json.RawMessage, error) {
	directive := d.Val()
	if !d.NextArg() {
		return nil, placef(d, "%s: name where the ranges come from, for example %s static 10.0.0.0/8", directive, directive)
	}
	if strings.ContainsAny(d.Val(), ".:/") {
		return nil, placef(d, "%s %s: ranges written here are the module static: write %s static %s", directive, d.Val(), directive, d.Val())
	}
	name := d.Val()
	if name == "private_ranges" {
		if d.NextArg() {
			return nil, placedError{d.ArgErr()}
		}
		return ipSourceJSON(&caddyhttp.StaticIPRange{Ranges: caddyhttp.PrivateRangesCIDR()}), nil
	}
	module, err := caddyfile.UnmarshalModule(d, "http.ip_sources."+name)
	if err != nil {
		return nil, placedByCaddy(d, err)
	}
	source, ok := module.(caddyhttp.IPRangeSource)
	if !ok {
		return nil, placef(d, "module %s is not an IP range source", name)
	}
	if static, ok := module.(*caddyhttp.StaticIPRange); ok {
		if err := validateRanges(directive, static.Ranges); err != nil {
			return nil, place(d, err)
		}
	}
	return ipSourceJSON(source), nil
}

func validateRanges(directive string, ranges []string) error {
	if len(ranges) == 0 {
		return fmt.Errorf("%s: no range is given", directive)
	}
	for _, text := range ranges {
		if _, err := caddyhttp.CIDRExpressionToPrefix(text); err != nil {
			return fmt.Errorf("%s: %q is no address and no range", directive, text)
		}
	}
	return nil
}

func ipSourceJSON(source caddyhttp.IPRangeSource) json.RawMessage {
	name := source.(caddy.Module).CaddyModule().ID.Name()
	return caddyconfig.JSONModuleObject(source, "source", name, nil)
}

// unmarshalLimit parses a limit. Syntax:
//
//	limit <name> <rate> {
//		burst       <n>
//		key         <part...>
//		key_writer  caller|server
//		ipv4_prefix <bits>
//		ipv6_prefix <bits>
//		match       <matcher> | match { <matchers> }
//		exempt      <ranges...>
//		status      <code>
//		observe
//	}
//
// h is nil in the global options, which know no named matchers.
func unmarshalLimit(b *block, h *httpcaddyfile.Helper) (*Limit, error) {
	limit := new(Limit)
	opening := *b.Dispenser
	if err := b.nameAndRate(&limit.Name, &limit.Rate); err != nil {
		return nil, err
	}
	inner := block{Dispenser: b.Dispenser}
	for inner.next() {
		var err error
		switch inner.Val() {
		case "burst":
			err = inner.once(func() error { return inner.count(&limit.Burst) })
		case "key":
			err = inner.once(func() error { return inner.words(&limit.Key) })
		case "key_writer":
			err = inner.once(func() error { return inner.word(&limit.KeyWriter) })
		case "ipv4_prefix":
			err = inner.once(func() error { return inner.number(&limit.IPv4Prefix, 1, 32) })
		case "ipv6_prefix":
			err = inner.once(func() error { return inner.number(&limit.IPv6Prefix, 1, 128) })
		case "match":
			err = inner.once(func() error { return inner.matcher(h, &limit.MatcherSetsRaw) })
		case "exempt":
			err = limit.unmarshalExempt(inner.Dispenser)
		case "status":
			err = inner.once(func() error { return inner.number(&limit.Status, 400, 599) })
		case "observe":
			err = inner.once(func() error { return inner.flag(&limit.Observe) })
		default:
			err = inner.unrecognized()
		}
		if err != nil {
			return nil, place(inner.Dispenser, err)
		}
	}
	if err := limit.validate(); err != nil {
		return nil, place(&opening, fmt.Errorf("limit %s: %w", limit.Name, err))
	}
	return limit, nil
}

// unmarshalExempt takes ranges, private_ranges among them, or one module of the
// http.ip_sources namespace with its arguments.
func (l *Limit) unmarshalExempt(d *caddyfile.Dispenser) error {
	probe := *d
	if !probe.NextArg() {
		return placef(d, "exempt: no range is given")
	}
	if _, err := caddy.GetModule("http.ip_sources." + probe.Val()); err == nil {
		source, err := unmarshalIPSource(d)
		l.ExemptRaw = append(l.ExemptRaw, source)
		return err
	}
	static := new(caddyhttp.StaticIPRange)
	for _, text := range d.RemainingArgs() {
		if text == "private_ranges" {
			static.Ranges = append(static.Ranges, caddyhttp.PrivateRangesCIDR()...)
		} else {
			static.Ranges = append(static.Ranges, text)
		}
	}
	l.ExemptRaw = append(l.ExemptRaw, ipSourceJSON(static))
	return validateRanges("exempt", static.Ranges)
}

// unmarshalCeiling parses a ceiling. Syntax:
//
//	ceiling <name> <rate> {
//		match  <matcher> | match { <matchers> }
//		status <code>
//		observe
//	}
func unmarshalCeiling(b *block, h *httpcaddyfile.Helper) (*Ceiling, error) {
	ceiling := new(Ceiling)
	opening := *b.Dispenser
	if err := b.nameAndRate(&ceiling.Name, &ceiling.Rate); err != nil {
		return nil, err
	}
	inner := block{Dispenser: b.Dispenser}
	for inner.next() {
		var err error
		switch inner.Val() {
		case "match":
			err = inner.once(func() error { return inner.matcher(h, &ceiling.MatcherSetsRaw) })
		case "status":
			err = inner.once(func() error { return inner.number(&ceiling.Status, 400, 599) })
		case "observe":
			err = inner.once(func() error { return inner.flag(&ceiling.Observe) })
		default:
			err = inner.unrecognized()
		}
		if err != nil {
			return nil, place(inner.Dispenser, err)
		}
	}
	if err := ceiling.validate(); err != nil {
		return nil, place(&opening, fmt.Errorf("ceiling %s: %w", ceiling.Name, err))
	}
	return ceiling, nil
}

// parseProbe parses the probe's directive. Syntax:
//
//	edge_limit_probe [<matcher>] {
//		detail
//	}
func parseProbe(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next() // the directive's name
	probe := new(Probe)
	if h.NextArg() {
		return nil, placedError{h.ArgErr()}
	}
	b := block{Dispenser: h.Dispenser}
	for b.next() {
		if b.Val() != "detail" {
			return nil, b.unrecognized()
		}
		if err := b.once(func() error { return b.flag(&probe.Detail) }); err != nil {
			return nil, place(h.Dispenser, err)
		}
	}
	return probe, nil
}
