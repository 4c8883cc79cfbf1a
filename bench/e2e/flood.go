package main

import (
	"errors"
	"fmt"
	"math"
)

// The flood: each request has a client that was never there before, which is what
// makes a limiter's memory grow. The clients stand in X-Forwarded-For, and the
// load generator's address is a trusted proxy. The limit is one whose debts
// outlast the flood, so that no key may be forgotten for free once the table is
// full: the worst that can come.

const floodWindows = 10

// leastFlood is the shortest flood of which ratios say something: each tenth of it
// has a hundred collections and more.
const leastFlood = 1_000_000

// floodWindow is a tenth of the flood.
type floodWindow struct {
	measurement
	rss int64
}

func measureFlood(o options, programs map[string]string, directory string, report *report) error {
	window := o.flood / floodWindows
	maxKeys := max(1000, window) // the default, a million, for a flood of 10 million
	flooded := serverKind{name: "flood", program: "ours", status: "200",
		options: fmt.Sprintf("edge_limit {\nmax_keys %d\n%s}\n", maxKeys, trustLoad),
		config:  "edge_limit {\n" + lastingLimit + endlessCeiling + "}\nrespond ok"}

	progress("sending floods of %s to find the GOGC with which both collect alike", number(max(300_000, maxKeys)))
	g := &generator{cpu: o.loadCPU}
	gogc, err := paceAlike(g, o, programs, directory, flooded, maxKeys)
	if err != nil {
		return err
	}
	kinds := []string{bare.name, flooded.name}
	servers := make(map[string]*server)
	request := make(map[string]func() []byte)
	for i, kind := range []serverKind{bare, flooded} {
		s, err := startServer(kind, programs, directory, o.serverCPU, []int{100, gogc}[i])
		if err != nil {
			return err
		}
		defer s.stop()
		servers[kind.name] = s
		request[kind.name] = freshClients(requestHead)
		if err := warmUp(g, s, o, request[kind.name]); err != nil {
			return err
		}
	}
	results := make(map[string][]floodWindow)
	for i := range floodWindows {
		progress("flood: part %d of %d", i+1, floodWindows)
		for j := range kinds {
			name := kinds[(i+j)%2] // none is always the first
			s := servers[name]
			m, err := measure(g, s, load{
				address: s.address, connections: o.connections, status: s.status,
				request: request[name], requests: window,
			})
			if err != nil {
				return err
			}
			u, err := s.usage()
			if err != nil {
				return err
			}
			results[name] = append(results[name], floodWindow{m, u.rss})
		}
	}
	fmt.Printf("\nThe flooded server's GOGC is %d where bare Caddy's is 100: its table makes the heap larger, and Go would collect less often.\n", gogc)
	report.floods(kinds, results, window, maxKeys)
	return nil
}

// paceAlike finds the GOGC with which a server whose table is full collects as
// often as a bare one does with 100. A table counts as heap in use, and with the
// same GOGC the server would collect less often: it would look faster than it is.
func paceAlike(g *generator, o options, programs map[string]string, directory string, flooded serverKind, maxKeys int) (gogc int, err error) {
	collections := func(kind serverKind, gogc, before int) (float64, error) {
		s, err := startServer(kind, programs, directory, o.serverCPU, gogc)
		if err != nil {
			return 0, err
		}
		defer s.stop()
		l := load{address: s.address, connections: o.connections, status: kind.status, request: freshClients(requestHead), requests: before}
		if _, err := g.run(l); err != nil {
			return 0, err
		}
		l.requests = 300_000
		m, err := measure(g, s, l)
		return m.collections, err
	}
	wanted, err := collections(bare, 100, 100_000)
	if err != nil {
		return 0, err
	}
	gogc = 100
	for range 2 {
		got, err := collections(flooded, gogc, maxKeys+maxKeys/10)
		if err != nil {
			return 0, err
		}
		if got == 0 || wanted == 0 {
			return 0, errors.New("the garbage collector never ran")
		}
		// Garbage between two collections grows with GOGC, and how often they come
		// falls with it; but a part of the heap does not, so a second step is needed.
		gogc = max(1, int(math.Round(float64(gogc)*got/wanted)))
	}
	return gogc, nil
}
