package edgelimit

import (
	"fmt"
	"math"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// definition parses a limit, an in_flight or a ceiling, and appends it. known
// says whether the word was one of these.
func (b *block) definition(limits *[]*Limit, inFlight *[]*InFlight, ceilings *[]*Ceiling, h *httpcaddyfile.Helper) (name string, known bool, err error) {
	switch b.Val() {
	case "limit":
		limit, err := unmarshalLimit(b, h)
		*limits = append(*limits, limit)
		return limit.Name, true, err
	case "in_flight":
		f, err := unmarshalInFlight(b, h)
		*inFlight = append(*inFlight, f)
		return f.Name, true, err
	case "ceiling":
		ceiling, err := unmarshalCeiling(b, h)
		*ceilings = append(*ceilings, ceiling)
		return ceiling.Name, true, err
	}
	return "", false, nil
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
//		on_status   [late] <codes...>
//		ban         <duration> [extend]
//		cost        <n>
//		status      <code>
//		observe
//	}
//
// h is nil in the global options, which know no named matchers.
func unmarshalLimit(b *block, h *httpcaddyfile.Helper) (*Limit, error) {
	limit := new(Limit)
	opening := *b.Dispenser
	if err := b.nameAndRate(&limit.Name, &limit.Rate); err != nil {
		return limit, err
	}
	inner := block{Dispenser: b.Dispenser}
	for inner.next() {
		var err error
		switch inner.Val() {
		case "burst":
			err = inner.once(func() error { return inner.count(&limit.Burst) })
		case "key":
			err = inner.once(func() error { return inner.keyParts(&limit.Key) })
		case "key_writer":
			err = inner.once(func() error {
				if err := inner.word(&limit.KeyWriter, "caller or server"); err != nil {
					return err
				}
				return validateKeyWriter(limit.KeyWriter)
			})
		case "ipv4_prefix":
			err = inner.once(func() error { return inner.number(&limit.IPv4Prefix, 1, 32) })
		case "ipv6_prefix":
			err = inner.once(func() error { return inner.number(&limit.IPv6Prefix, 1, 128) })
		case "match":
			err = inner.once(func() error { return inner.matcher(h, &limit.MatcherSetsRaw) })
		case "exempt":
			err = limit.unmarshalExempt(inner.Dispenser)
		case "on_status":
			err = inner.once(func() error { return limit.unmarshalOnStatus(&inner) })
		case "ban":
			err = inner.once(func() error { return limit.unmarshalBan(&inner) })
		case "cost":
			err = inner.once(func() error {
				if err := inner.word(&limit.Cost, "a positive number or a placeholder"); err != nil {
					return err
				}
				_, err := parseCost(limit.Cost, math.MaxInt64) // the burst may follow
				return err
			})
		case "status":
			err = inner.once(func() error { return inner.number(&limit.Status, 400, 599) })
		case "observe":
			err = inner.once(func() error { return inner.flag(&limit.Observe) })
		default:
			err = inner.unrecognized("burst, key, key_writer, ipv4_prefix, ipv6_prefix, match, exempt, on_status, ban, cost, status, observe")
		}
		if err != nil {
			return limit, place(inner.Dispenser, err)
		}
	}
	if err := limit.validate(); err != nil {
		return limit, place(&opening, fmt.Errorf("limit %s: %w", limit.Name, err))
	}
	return limit, nil
}

func (l *Limit) unmarshalOnStatus(b *block) error {
	codes := b.RemainingArgs()
	l.OnStatus = &OnStatus{Late: len(codes) > 0 && codes[0] == "late"}
	if l.OnStatus.Late {
		codes = codes[1:]
	}
	l.OnStatus.Codes = codes
	return l.OnStatus.validate()
}

func (l *Limit) unmarshalBan(b *block) error {
	if !b.NextArg() {
		return placef(b.Dispenser, "ban: a duration is missing, for example 10m")
	}
	duration, err := caddy.ParseDuration(b.Val())
	if err != nil || duration <= 0 || duration > maxWindow {
		return fmt.Errorf("ban %q: must be a duration of at most 3650d, for example 10m", b.Val())
	}
	l.Ban = caddy.Duration(duration)
	if b.NextArg() {
		if b.Val() != "extend" {
			return fmt.Errorf("unexpected %q after ban: only the word extend is possible", b.Val())
		}
		l.Extend = true
	}
	return b.end()
}

// keyParts reads the parts of a key.
func (b *block) keyParts(target *[]string) error {
	if err := b.words(target, "the word client, placeholders or text"); err != nil {
		return err
	}
	_, err := parseKey(*target)
	return err
}

// unmarshalExempt takes ranges, private_ranges among them, or one module of the
// http.ip_sources namespace with its arguments.
func (l *Limit) unmarshalExempt(d *caddyfile.Dispenser) error {
	probe := *d
	if !probe.NextArg() {
		return placef(d, "exempt: no range is given: write for example exempt private_ranges")
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
		return ceiling, err
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
			err = inner.unrecognized("match, status, observe")
		}
		if err != nil {
			return ceiling, place(inner.Dispenser, err)
		}
	}
	if err := ceiling.validate(); err != nil {
		return ceiling, place(&opening, fmt.Errorf("ceiling %s: %w", ceiling.Name, err))
	}
	return ceiling, nil
}

// unmarshalInFlight parses a bound of requests at the same time. Syntax:
//
//	in_flight <name> <n> {
//		key    <part...>
//		match  <matcher> | match { <matchers> }
//		status <code>
//		observe
//	}
func unmarshalInFlight(b *block, h *httpcaddyfile.Helper) (*InFlight, error) {
	f := new(InFlight)
	opening := *b.Dispenser
	if !b.Args(&f.Name) || !b.NextArg() {
		return f, placef(b.Dispenser, "in_flight needs a name and a number: write for example in_flight uploads 20")
	}
	n, err := strconv.ParseInt(b.Val(), 10, 64)
	if err != nil || n < 1 {
		return f, placef(b.Dispenser, "in_flight %s %q: must be a whole number of at least 1", f.Name, b.Val())
	}
	f.Max = n
	if err := b.end(); err != nil {
		return f, err
	}
	inner := block{Dispenser: b.Dispenser}
	for inner.next() {
		var err error
		switch inner.Val() {
		case "key":
			err = inner.once(func() error { return inner.keyParts(&f.Key) })
		case "match":
			err = inner.once(func() error { return inner.matcher(h, &f.MatcherSetsRaw) })
		case "status":
			err = inner.once(func() error { return inner.number(&f.Status, 400, 599) })
		case "observe":
			err = inner.once(func() error { return inner.flag(&f.Observe) })
		default:
			err = inner.unrecognized("key, match, status, observe")
		}
		if err != nil {
			return f, place(inner.Dispenser, err)
		}
	}
	if err := f.validate(); err != nil {
		return f, place(&opening, fmt.Errorf("in_flight %s: %w", f.Name, err))
	}
	return f, nil
}
