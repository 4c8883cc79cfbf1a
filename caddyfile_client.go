package edgelimit

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

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
			return placef(d, "unexpected argument %q", d.Val())
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
			err = b.once(func() error {
				if err := b.word(&c.Header, "the name of a header"); err != nil {
					return err
				}
				return validateHeaderNames("header", []string{c.Header})
			})
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
			err = b.unrecognized("trusted_proxies, trusted_proxies_unix, header, hops, single_value, proof")
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
		return placef(b.Dispenser, "hops: an argument is missing: write a number from 1 to %d", maxHops)
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
		return placef(d, "proof: a header and a secret are missing: write proof <header> {env.NAME}")
	}
	p.Header = d.Val()
	p.Secrets = d.RemainingArgs()
	if err := p.validate(); err != nil {
		return err
	}
	b := block{Dispenser: d}
	for b.next() {
		if b.Val() != "client_header" {
			return b.unrecognized("client_header")
		}
		if err := b.once(func() error {
			if err := b.word(&p.ClientHeader, "the name of a header"); err != nil {
				return err
			}
			return validateHeaderNames("client_header", []string{p.ClientHeader})
		}); err != nil {
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
			return nil, placef(d, "unexpected argument %q: private_ranges stands alone: write %s static %s on a line of its own", d.Val(), directive, d.Val())
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
		return fmt.Errorf("%s: no range is given: write for example %s static 10.0.0.0/8", directive, directive)
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
