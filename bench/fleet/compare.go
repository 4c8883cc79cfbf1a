package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
	"github.com/edgelimit/caddy-edgelimit/bench/internal/stats"
)

// bench has what the measurements need.
type bench struct {
	options
	programs  map[string]string
	directory string
	ports     ports
	redis     *redisServer
	loads     int // so far
}

const atLeast = 2 // times as many requests a second as with a call for each

// The limits of the mixes. Where all is allowed, debts outlast what is measured, so
// that each request reads its keys and writes them. Where half is denied, each
// Caddy has a limit of its own that denies half of what it is sent.
var (
	endless = limit{1, time.Second, 1_000_000, 1}
	several = limit{1, time.Second, 1_000_000, 3}
	flooded = limit{10, 100 * time.Second, 5, 1}
)

const (
	halfWindow = 100 * time.Second // long, so that a whole count is fine enough
	halfBurst  = 5
	maxSearch  = 60 // loads, of both Caddys
)

type mix struct {
	name   string
	caddys []string
	limits map[string]limit // by Caddy
	least  float64          // of requests that must be denied, and most
	most   float64
}

// measurement is one Caddy in one round.
type measurement struct {
	perSecond float64
	denied    float64 // the part of requests
	p99       float64 // ms
	caddyCPU  float64 // us a request
	asked     float64 // how often Redis is asked about a request
	calls     float64 // of Redis, a request
	redisCPU  float64 // us a request, of the whole process
	script    float64 // us a request, in the script
	failures  float64 // calls that failed, of 1000 requests

	caddyBusy, redisBusy, loadBusy float64 // cores

	complaint string // why it is not what it should be
}

// compare measures the Caddys in all mixes.
func (b *bench) compare() error {
	half := make(map[string]limit)
	for _, name := range []string{edgeLimit, perRequest} {
		var err error
		if half[name], err = b.halve(name); err != nil {
			return err
		}
	}
	alike := func(l limit) map[string]limit { return map[string]limit{edgeLimit: l, perRequest: l} }
	mixes := []mix{
		{"all allowed", []string{edgeLimit, perRequest, noLimiter}, alike(endless), 0, 0},
		{"all allowed, three limits", []string{edgeLimit, perRequest, noLimiter}, alike(several), 0, 0},
		{"half denied", []string{edgeLimit, perRequest}, half, 0.4, 0.6},
		{"flood", []string{edgeLimit, perRequest}, alike(flooded), 0.9, 1},
	}
	results := make([]map[string][]measurement, len(mixes))
	for i := range results {
		results[i] = make(map[string][]measurement)
	}
	for round := range b.rounds {
		for i, mix := range mixes {
			for n := range mix.caddys {
				name := mix.caddys[(n+round)%len(mix.caddys)] // none is always the first
				m, err := b.measure(name, mix.limits[name])   // no limit where there is no limiter
				if err != nil {
					return fmt.Errorf("%s, %s: %w", mix.name, name, err)
				}
				results[i][name] = append(results[i][name], m)
			}
		}
	}
	report(mixes, results)
	return nil
}

// halve looks for a limit that denies half of what a Caddy can answer.
func (b *bench) halve(name string) (limit, error) {
	m, err := b.measure(name, endless)
	if err != nil {
		return limit{}, fmt.Errorf("looking for the limit that denies half, %s: %w", name, err)
	}
	l := limit{0, halfWindow, halfBurst, 1}
	for allowed := m.perSecond / 2; ; {
		l.count = max(1, int(math.Round(allowed/float64(b.clients)*halfWindow.Seconds())))
		if m, err = b.measure(name, l); err != nil {
			return limit{}, fmt.Errorf("looking for the limit that denies half, %s: %w", name, err)
		}
		if math.Abs(m.denied-0.5) < 0.04 {
			return l, nil
		}
		allowed = (allowed + m.perSecond/2) / 2 // a denial costs less than what it denies: not all the way at once
		if b.loads > maxSearch {
			return limit{}, errors.New("no limit denies half: too much else runs here")
		}
	}
}

// measure starts a Caddy with nothing in Redis, and sends it requests.
func (b *bench) measure(name string, l limit) (m measurement, err error) {
	if err := b.redis.empty(); err != nil {
		return m, err
	}
	c, err := b.start(name, l)
	if err != nil {
		return m, err
	}
	defer process.Stop(c.command)
	if _, err := b.load(b.ports.caddy, b.warmUp); err != nil { // bursts end here
		return m, err
	}
	_, logged, err := c.complaint(0)
	if err != nil {
		return m, err
	}
	asked, failures, err := c.asked()
	if err != nil {
		return m, err
	}
	redis, err := b.redis.usage()
	if err != nil {
		return m, err
	}
	before, err := process.UsageOf(c.command)
	if err != nil {
		return m, err
	}
	r, err := b.load(b.ports.caddy, b.duration)
	if err != nil {
		return m, err
	}
	after, err := process.UsageOf(c.command)
	if err != nil {
		return m, err
	}
	redisAfter, err := b.redis.usage()
	if err != nil {
		return m, err
	}
	askedAfter, failuresAfter, err := c.asked()
	if err != nil {
		return m, err
	}
	complaint, _, err := c.complaint(logged)
	if err != nil {
		return m, err
	}
	redis = redisAfter.since(redis)
	requests, seconds := float64(r.requests), r.elapsed.Seconds()
	cpu := after.CPU - before.CPU
	if name == perRequest {
		askedAfter = redis.calls // one at a time
	}
	return measurement{
		perSecond: requests / seconds, denied: float64(r.denied) / requests, p99: float64(r.p99) / float64(time.Millisecond),
		caddyCPU: micros(cpu) / requests, asked: float64(askedAfter-asked) / requests, calls: float64(redis.calls) / requests,
		redisCPU: micros(redis.cpu) / requests, script: micros(redis.script) / requests,
		failures:  float64(failuresAfter-failures) / requests * 1000,
		caddyBusy: cpu.Seconds() / seconds, redisBusy: redis.cpu.Seconds() / seconds, loadBusy: r.cpu.Seconds() / seconds,
		complaint: complaint,
	}, nil
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// report writes the tables, and judges each mix.
func report(mixes []mix, results []map[string][]measurement) {
	fmt.Println("\n## Against a call of Redis for each request")
	fmt.Println("\nMedians of the rounds.")
	fmt.Println("\n| mix | Caddy | limit of a client | denied | requests a second | p99 | CPU a request of Caddy | Redis is asked, a request | its calls, a request | " +
		"Redis's CPU a request | of it in the script | cores of Caddy, Redis, wrk | failed calls in 1000 requests |")
	fmt.Println("|---" + strings.Repeat("|---", 12) + "|")
	for i, mix := range mixes {
		for _, name := range mix.caddys {
			middle := func(f func(measurement) float64) float64 { return stats.SpreadOf(each(results[i][name], f)).Median }
			fmt.Printf("| %s | %s | %s | %.1f %% | %.0f | %.1f ms | %.1f us | %.2f | %.2f | %.1f us | %.1f us | %.2f, %.2f, %.2f | %.2f |\n", mix.name, name, mix.limits[name],
				100*middle(func(m measurement) float64 { return m.denied }),
				middle(func(m measurement) float64 { return m.perSecond }),
				middle(func(m measurement) float64 { return m.p99 }),
				middle(func(m measurement) float64 { return m.caddyCPU }),
				middle(func(m measurement) float64 { return m.asked }),
				middle(func(m measurement) float64 { return m.calls }),
				middle(func(m measurement) float64 { return m.redisCPU }),
				middle(func(m measurement) float64 { return m.script }),
				middle(func(m measurement) float64 { return m.caddyBusy }),
				middle(func(m measurement) float64 { return m.redisBusy }),
				middle(func(m measurement) float64 { return m.loadBusy }),
				middle(func(m measurement) float64 { return m.failures }))
		}
	}
	fmt.Printf("\nRequests a second, as a multiple of %s's in the same round. Asked of %s: a median of at least %d.\n", perRequest, edgeLimit, atLeast)
	fmt.Println("\n| mix | min / median / max | by CPU of Caddy a request | |\n|---|---|---|---|")
	for i, mix := range mixes {
		for _, name := range mix.caddys {
			if name == perRequest {
				continue
			}
			own, other := results[i][name], results[i][perRequest]
			ratios, byCPU := make([]float64, len(own)), make([]float64, len(own))
			for n := range own {
				ratios[n] = own[n].perSecond / other[n].perSecond
				byCPU[n] = other[n].caddyCPU / own[n].caddyCPU
			}
			ratio := stats.SpreadOf(ratios)
			what, word := mix.name, verdict(mix, ratio.Median, slices.Concat(own, other))
			if name == noLimiter {
				what, word = what+", without any limiter", "what a limiter that costs nothing would reach"
			}
			fmt.Printf("| %s | %s | %s | %s |\n", what, ratio, stats.SpreadOf(byCPU), word)
		}
	}
}

// verdict says pass or fail, or why the measurement says nothing.
func verdict(mix mix, ratio float64, all []measurement) string {
	for _, m := range all {
		switch {
		case m.complaint != "":
			return "not valid, a Caddy said: `" + m.complaint + "`"
		case m.denied < mix.least || m.denied > mix.most:
			return fmt.Sprintf("not valid: %.1f %% were denied in a round", 100*m.denied)
		case m.failures > 1:
			return fmt.Sprintf("not valid: %.1f calls in 1000 requests failed in a round", m.failures)
		case mix.most == 0 && m.asked < 0.99:
			return fmt.Sprintf("not valid: Redis was asked about %.2f of the requests only in a round", m.asked)
		}
	}
	if ratio >= atLeast {
		return "pass"
	}
	return "**fail**"
}

func each(ms []measurement, f func(measurement) float64) (values []float64) {
	for _, m := range ms {
		values = append(values, f(m))
	}
	return values
}
