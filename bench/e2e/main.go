// Command e2e measures edge_limit in a Caddy that serves over sockets, against a
// bare Caddy, a handler that does nothing, and nginx; and it says for each thing
// that edge_limit is to reach whether it does. Run it in bench/:
//
//	go run ./e2e
//
// The server under test runs on one core with GOMAXPROCS=1, the load generator on
// another. Servers are measured in rounds, each of which has all of them once, so
// that what disturbs the machine disturbs all alike. Linux only.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
)

type options struct {
	rounds      int
	duration    time.Duration
	connections int
	serverCPU   int
	loadCPU     int
	only        *regexp.Regexp
	inProcess   bool
	flood       int
}

func main() {
	var o options
	only := flag.String("rows", "", "measure only rows whose server's name matches")
	flag.IntVar(&o.rounds, "rounds", 15, "how often each server is measured")
	flag.DurationVar(&o.duration, "duration", time.Second, "how long a server is measured in a round; with less, what is compared is closer together")
	flag.IntVar(&o.connections, "connections", 32, "connections of the load generator")
	flag.IntVar(&o.serverCPU, "server-cpu", 0, "core of the server")
	flag.IntVar(&o.loadCPU, "load-cpu", 1, "core of the load generator")
	flag.BoolVar(&o.inProcess, "inprocess", true, "run the benchmarks of single decisions and of the handler too")
	flag.IntVar(&o.flood, "flood", 1_000_000, fmt.Sprintf("requests of the flood of fresh keys, each way, and about a million before it to pace the garbage collector; 0: no flood; 10000000 is what is to be reached, and with less than %d nothing is judged", leastFlood))
	flag.Parse()
	o.only = regexp.MustCompile(*only)
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
}

func run(o options) error {
	directory, remove, err := process.WorkDirectory("edge_limit-e2e")
	if err != nil {
		return err
	}
	defer remove()
	programs, err := build(directory)
	if err != nil {
		return err
	}
	process.DescribeMachine()

	var report report
	if o.inProcess {
		progress("benchmarks in one process")
		if err := measureInProcess(&report); err != nil {
			return err
		}
	}
	if err := compareServers(o, programs, directory, &report); err != nil {
		return err
	}
	if o.flood > 0 {
		if err := measureFlood(o, programs, directory, &report); err != nil {
			return err
		}
	}
	report.print()
	return nil
}

// progress says what is going on, beside the results.
func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}

// build builds the programs under test, all with the same flags, and looks for
// nginx.
func build(directory string) (programs map[string]string, err error) {
	programs = make(map[string]string)
	for name, pkg := range map[string]string{
		"bare":    "github.com/edgelimit/caddy-edgelimit/bench/e2e/bare",
		"nothing": "github.com/edgelimit/caddy-edgelimit/bench/e2e/nothing",
		"ours":    "github.com/edgelimit/caddy-edgelimit/xcaddy",
	} {
		programs[name] = filepath.Join(directory, name)
		command := exec.Command("go", "build", "-o", programs[name], pkg)
		if output, err := command.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("building %s: %w\n%s", name, err, output)
		}
	}
	if programs["nginx"], err = exec.LookPath("nginx"); err != nil {
		fmt.Println("nginx is not installed: its rows are left out.")
		delete(programs, "nginx")
	}
	return programs, nil
}

// measurement is one server in one round.
type measurement struct {
	perSecond   float64
	cpu         time.Duration // of the server, a request
	busy        float64       // the share of its core that the server had
	collections float64       // in 100,000 requests
	worst, p99  time.Duration
}

// measure sends a load to a server.
func measure(g *generator, s *server, l load) (measurement, error) {
	before, err := s.usage()
	if err != nil {
		return measurement{}, err
	}
	result, err := g.run(l)
	if err != nil {
		return measurement{}, fmt.Errorf("%s: %w", s.name, err)
	}
	after, err := s.usage()
	if err != nil {
		return measurement{}, err
	}
	cpu := after.cpu - before.cpu
	return measurement{
		perSecond:   result.perSecond(),
		cpu:         cpu / time.Duration(result.requests),
		busy:        cpu.Seconds() / result.elapsed.Seconds(),
		collections: float64(after.collections-before.collections) / float64(result.requests) * 100_000,
		worst:       result.worst(), p99: result.percentile(0.99),
	}, nil
}

const requestHead = "GET / HTTP/1.1\r\nHost: example.com\r\nUser-Agent: load\r\nAccept: */*\r\n"

// compareServers measures all servers in rounds.
func compareServers(o options, programs map[string]string, directory string, report *report) error {
	g := &generator{cpu: o.loadCPU}
	var servers []*server
	defer func() {
		for _, s := range servers {
			s.stop()
		}
	}()
	var measured []row
	var requests []func() []byte
	for _, row := range rows {
		if _, ok := programs[row.server.program]; !ok || !o.wants(row) {
			continue
		}
		s, err := startServer(row.server, programs, directory, o.serverCPU, 100)
		if err != nil {
			return err
		}
		request := directClient()
		if s.request != nil {
			request = s.request()
		}
		servers, measured, requests = append(servers, s), append(measured, row), append(requests, request)
		if err := warmUp(g, s, o, request); err != nil {
			return err
		}
	}
	results := make(map[string][]measurement)
	for round := range o.rounds {
		progress("servers: round %d of %d", round+1, o.rounds)
		for i := range servers {
			turn := (i + round) % len(servers) // none is always the first
			s := servers[turn]
			m, err := measure(g, s, load{
				address: s.address, connections: o.connections, status: s.status,
				request: requests[turn], duration: o.duration,
			})
			if err != nil {
				return err
			}
			results[s.name] = append(results[s.name], m)
		}
	}
	report.servers(measured, results)
	return nil
}

func (o *options) wants(r row) bool {
	return o.only.MatchString(r.server.name) || slices.ContainsFunc(rows, func(other row) bool {
		return other.against.name == r.server.name && o.only.MatchString(other.server.name)
	})
}

// warmUp sends some requests: the first to a server that denies is allowed, and
// Go's collector needs some to find its pace.
func warmUp(g *generator, s *server, o options, request func() []byte) error {
	_, err := g.run(load{address: s.address, connections: o.connections, status: s.status, request: request, duration: time.Second})
	return err
}
