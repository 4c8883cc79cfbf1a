package edgelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

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
//		persist     on|off
//		store       <module> { ... }
//		limit       <name> <rate> { ... }
//		ceiling     <name> <rate> { ... }
//		in_flight   <name> <n> { ... }
//	}
func (a *App) unmarshalCaddyfile(d *caddyfile.Dispenser) error {
	b := block{Dispenser: d}
	if err := b.end(); err != nil {
		return err
	}
	places := make(map[string]string)
	for b.next() {
		at := placeOf(d)
		if known, err := a.Options.unmarshalOption(&b); err != nil {
			return err
		} else if known {
			continue
		}
		if name, known, err := b.definition(&a.Limits, &a.InFlight, &a.Ceilings, nil); err != nil {
			return err
		} else if known {
			if before, ok := places[name]; ok {
				return fmt.Errorf("the name %s is defined twice, at %s and at %s: give one of them another name", name, before, at)
			}
			places[name] = at
			continue
		}
		if err := a.unmarshalSetting(&b); err != nil {
			return err
		}
	}
	return nil
}

// unmarshalSetting parses what only the global option has.
func (a *App) unmarshalSetting(b *block) error {
	switch b.Val() {
	case "ipv4_prefix":
		return b.once(func() error { return b.number(&a.IPv4Prefix, 1, 32) })
	case "ipv6_prefix":
		return b.once(func() error { return b.number(&a.IPv6Prefix, 1, 128) })
	case "max_keys":
		return b.once(func() error { return b.number(&a.MaxKeys, 1, maxMaxKeys) })
	case "pepper":
		return b.once(func() error {
			if err := b.word(&a.Pepper, "{env.NAME}"); err != nil {
				return err
			}
			if strings.Contains(a.Pepper, "{") {
				return nil // its length is known when it is read
			}
			if err := requireLongPepper(a.Pepper); err != nil {
				return fmt.Errorf("pepper: %w", err)
			}
			return nil
		})
	case "persist":
		return b.once(func() error {
			return b.argument("on or off", func(text string) error {
				if text != "on" && text != "off" {
					return fmt.Errorf("%q: must be on or off", text)
				}
				on := text == "on"
				a.Persist = &on
				return nil
			})
		})
	case "store":
		return b.once(func() error { return a.unmarshalStore(b) })
	}
	return b.unrecognized("limit, ceiling, in_flight, client, unresolved, forward, strip, ratelimit_headers, observe, ipv4_prefix, ipv6_prefix, max_keys, pepper, persist, store")
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
//		in_flight  <name> <n> { ... }
//		client     connection | { ... }
//		unresolved share|deny|exempt
//		forward    off | <headers...>
//		strip      <headers...>
//		ratelimit_headers off|ietf|x
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
	places := make(map[string]string)
	for d.NextArg() {
		if global.definitionOf(d.Val()) == "" {
			return place(d, unknownNameError(d.Val()))
		}
		if slices.Contains(handler.Use, d.Val()) {
			return placef(d, "%s is used twice", d.Val())
		}
		handler.Use = append(handler.Use, d.Val())
		places[d.Val()] = placeOf(d)
	}

	b := block{Dispenser: d}
	for b.next() {
		at := placeOf(d)
		if known, err := handler.Options.unmarshalOption(&b); err != nil {
			return err
		} else if known {
			continue
		}
		name, known, err := b.definition(&handler.Limits, &handler.InFlight, &handler.Ceilings, &h)
		if err != nil {
			return err
		}
		if !known {
			return b.unrecognized("limit, ceiling, in_flight, client, unresolved, forward, strip, ratelimit_headers, observe")
		}
		if before, ok := places[name]; ok {
			return fmt.Errorf("the name %s is defined twice, at %s and at %s: give one of them another name", name, before, at)
		}
		places[name] = at
		own := App{Limits: handler.Limits, InFlight: handler.InFlight, Ceilings: handler.Ceilings}
		if err := defineInSite(h, global, name, own.definitionOf(name), at); err != nil {
			return err
		}
	}
	return handler.checkProvenance(global, places, placeOf(d))
}

// checkProvenance judges the directive as Provision will, to name the line.
func (handler *Handler) checkProvenance(global *App, places map[string]string, place string) error {
	limits, inFlight, ceilings := slices.Clone(handler.Limits), slices.Clone(handler.InFlight), slices.Clone(handler.Ceilings)
	for _, name := range handler.Use {
		for _, l := range global.Limits {
			if l.Name == name {
				limits = append(limits, l)
			}
		}
		for _, f := range global.InFlight {
			if f.Name == name {
				inFlight = append(inFlight, f)
			}
		}
		for _, c := range global.Ceilings {
			if c.Name == name {
				ceilings = append(ceilings, c)
			}
		}
	}
	err := checkProvenance(limits, inFlight, ceilings)
	var provenance *provenanceError
	if errors.As(err, &provenance) {
		if of, ok := places[provenance.name]; ok {
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
	for _, f := range app.InFlight {
		if err := f.validate(); err != nil {
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
	for _, f := range a.InFlight {
		if f.Name == name {
			return f.defined
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
			if err := b.word(&o.Unresolved, "share, deny or exempt"); err != nil {
				return err
			}
			return o.validate()
		})
	case "forward":
		err = b.once(func() error {
			if err := b.words(&o.Forward, "off, or the names of headers"); err != nil {
				return err
			}
			return o.validateForwarding()
		})
	case "ratelimit_headers":
		err = b.once(func() error {
			if err := b.word(&o.RatelimitHeaders, "off, ietf or x"); err != nil {
				return err
			}
			return o.validate()
		})
	case "strip":
		err = b.once(func() error {
			if err := b.words(&o.Strip, "the names of headers"); err != nil {
				return err
			}
			return o.validateForwarding()
		})
	case "observe":
		err = b.once(func() error { return b.flag(&o.Observe) })
	default:
		return false, nil
	}
	return true, place(b.Dispenser, err)
}

// parseProbe parses the probe's directive. Syntax:
//
//	edge_limit_probe [<matcher>] {
//		detail
//	}
func parseProbe(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next() // the directive's name
	probe := new(Probe)
	b := block{Dispenser: h.Dispenser}
	if err := b.end(); err != nil {
		return nil, err
	}
	for b.next() {
		if b.Val() != "detail" {
			return nil, b.unrecognized("detail")
		}
		if err := b.once(func() error { return b.flag(&probe.Detail) }); err != nil {
			return nil, place(h.Dispenser, err)
		}
	}
	return probe, nil
}
