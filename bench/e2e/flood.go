package main

import (
	"fmt"
	"math"
	"time"
)

// The flood: each request has a client that was never there before, which is what
// makes a limiter's memory grow. The clients stand in X-Forwarded-For, and the
// load generator's address is a trusted proxy. The limit is one whose debts
// outlast the flood, so that no key may be forgotten for free once the table is
// full: the worst that can come.

const floodWindows = 10

// floodWindow is a tenth of the flood.
type floodWindow struct {
	measurement
	rss int64
}

func measureFlood(o options, programs map[string]string, directory string, report *report) error {
	window := o.flood / floodWindows
	maxKeys := max(1000, window) // the default, a million, for a flood of 10 million
	flooded := serverKind{name: "flood", program: "ours", status: "200",
		options: fmt.Sprintf("edge_limit {\nmax_keys %d\nclient {\ntrusted_proxies static 127.0.0.1/32\n}\n}\n", maxKeys),
		config:  "edge_limit {\nlimit each 10/1d\n" + endlessCeiling + "}\nrespond ok"}

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

// paceAlike finds the GOGC with which a server whose table is full lets as much
// garbage lie as a bare one does with 100. A table counts as heap in use, and
// with the same GOGC the server would collect less often: it would look faster
// than it is.
func paceAlike(g *generator, o options, programs map[string]string, directory string, flooded serverKind, maxKeys int) (gogc int, err error) {
	garbage := func(kind serverKind, requests int, gogc int) (live, garbage float64, err error) {
		s, err := startServer(kind, programs, directory, o.serverCPU, gogc)
		if err != nil {
			return 0, 0, err
		}
		defer s.stop()
		fill := freshClients(requestHead)
		if requests > 0 {
			if _, err := g.run(load{address: s.address, connections: o.connections, status: kind.status, request: fill, requests: requests}); err != nil {
				return 0, 0, err
			}
		}
		if _, err := g.run(load{address: s.address, connections: o.connections, status: kind.status, request: fill, duration: 2 * time.Second}); err != nil {
			return 0, 0, err
		}
		u, err := s.usage()
		if err == nil && u.collections == 0 {
			err = fmt.Errorf("%s: the garbage collector never ran", s.name)
		}
		return u.live, u.total - u.live, err
	}
	_, allowed, err := garbage(bare, 0, 100)
	if err != nil {
		return 0, err
	}
	live, got, err := garbage(flooded, maxKeys, 100)
	if err != nil {
		return 0, err
	}
	fmt.Printf("\ngarbage between two collections: bare %.0f MB, flooded with GOGC=100 %.0f MB (%.0f MB live)\n", allowed, got, live)
	return max(1, int(math.Round(100*allowed/got))), nil
}
