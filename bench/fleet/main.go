// Command fleet measures edge_limit with its budgets in Redis against a Caddy
// that asks Redis about each request through redis_rate, and what budgets take
// there. Run it in bench/, with redis-server and wrk installed:
//
//	go run ./fleet
//
// Caddy runs on one core, Redis and the load generator on another. The Caddys are
// measured in each round, one directly after the other, so that what disturbs the
// machine disturbs all alike. Linux only.
package main

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
)

type options struct {
	rounds      int
	duration    time.Duration
	warmUp      time.Duration
	connections int
	clients     int
	pool        int // the most connections of redis_rate; 0: as many as its client library allows by itself
	caddyCPU    int
	otherCPU    int
	maxProcs    int
	timeout     time.Duration
	port        int
	compare     bool
	alone       bool
	keys        int
	calls       int
}

func main() {
	var o options
	pin := flag.Bool("pin", true, "run Caddy on one core, Redis and wrk on another; else the kernel places them")
	flag.IntVar(&o.rounds, "rounds", 5, "how often each Caddy is measured in each mix")
	flag.DurationVar(&o.duration, "duration", 5*time.Second, "how long a Caddy is measured in a round: whole seconds")
	flag.DurationVar(&o.warmUp, "warmup", 2*time.Second, "how long a Caddy gets the same load before: whole seconds")
	flag.IntVar(&o.connections, "connections", 64, "connections of the load generator")
	flag.IntVar(&o.clients, "clients", 1000, "how many clients the requests come from")
	ownPool := flag.Bool("own-pool", false, "leave it to redis_rate's client library how many connections to Redis it has, ten for each of GOMAXPROCS; else one for each of the load generator's")
	flag.IntVar(&o.caddyCPU, "caddy-cpu", 0, "core of Caddy")
	flag.IntVar(&o.otherCPU, "other-cpu", 1, "core of Redis and wrk")
	flag.IntVar(&o.maxProcs, "gomaxprocs", 0, "GOMAXPROCS of the Caddys; 0: the number of cores that they may run on, so 1 when pinned")
	flag.DurationVar(&o.timeout, "timeout", 50*time.Millisecond, "edge_limit's timeout of the store")
	flag.IntVar(&o.port, "port", 0, "first of three ports on the loopback interface, for Redis, Caddy and its metrics; 0: any that are free")
	flag.BoolVar(&o.compare, "compare", true, "compare the Caddys")
	flag.BoolVar(&o.alone, "alone", true, "compare the calls alone, without Caddys")
	flag.IntVar(&o.keys, "keys", 20_000, "keys whose size is measured; 0: none")
	flag.IntVar(&o.calls, "calls", 200_000, "calls of a script whose time is measured; 0: none")
	flag.Parse()
	if !*ownPool {
		o.pool = o.connections
	}
	if !*pin {
		o.caddyCPU, o.otherCPU = process.AnyCPU, process.AnyCPU
	}
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "fleet:", err)
		os.Exit(1)
	}
}

func run(o options) error {
	if o.duration < time.Second || o.duration%time.Second != 0 || o.warmUp < time.Second || o.warmUp%time.Second != 0 {
		return fmt.Errorf("duration %s and warmup %s: wrk wants whole seconds", o.duration, o.warmUp)
	}
	if o.rounds < 1 || o.clients < 1 || o.clients > maxClients {
		return fmt.Errorf("rounds %d must be at least 1, clients %d from 1 to %d", o.rounds, o.clients, maxClients)
	}
	for _, program := range []string{"redis-server", "wrk"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%s is missing (on Debian: apt-get install redis-server wrk): %w", program, err)
		}
	}
	directory, remove, err := process.WorkDirectory("edge_limit-fleet")
	if err != nil {
		return err
	}
	defer remove()
	ports, err := choosePorts(o.port)
	if err != nil {
		return err
	}
	process.DescribeMachine()
	o.describe()
	redis, err := startRedis(ports.redis, directory, o.otherCPU)
	if err != nil {
		return err
	}
	defer redis.stop()
	fmt.Printf("Redis %s, save \"\", appendonly no.\n", redis.version)

	if o.compare {
		programs, err := build(directory)
		if err != nil {
			return err
		}
		b := &bench{options: o, programs: programs, directory: directory, ports: ports, redis: redis}
		if err := b.compare(); err != nil {
			return err
		}
	}
	if o.alone {
		if err := measureDecisions(redis, o); err != nil {
			return err
		}
	}
	if o.keys > 0 {
		if err := measureSizes(redis, o.keys); err != nil {
			return err
		}
	}
	if o.calls > 0 {
		return measureScripts(redis, o.calls, o.connections, o.clients)
	}
	return nil
}

func (o *options) describe() {
	if o.caddyCPU == process.AnyCPU {
		fmt.Print("Nothing is pinned to a core. ")
	} else {
		fmt.Printf("Core %d has Caddy, core %d Redis and wrk. ", o.caddyCPU, o.otherCPU)
	}
	if o.maxProcs == 0 {
		fmt.Print("GOMAXPROCS is left to Go, ")
	} else {
		fmt.Printf("GOMAXPROCS=%d, ", o.maxProcs)
	}
	fmt.Printf("GOGC=100. %d connections, %d clients. redis_rate has ", o.connections, o.clients)
	if o.pool == 0 {
		fmt.Println("as many connections to Redis as its client library allows by itself.")
	} else {
		fmt.Printf("%d connections to Redis at most.\n", o.pool)
	}
}

// ports are where things listen.
type ports struct{ redis, caddy, metrics netip.AddrPort }

func choosePorts(first int) (ports, error) {
	var chosen [3]netip.AddrPort
	for i := range chosen {
		if first != 0 {
			chosen[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(first+i))
			continue
		}
		var err error
		if chosen[i], err = process.FreeAddress(); err != nil {
			return ports{}, err
		}
	}
	return ports{chosen[0], chosen[1], chosen[2]}, nil
}

// build builds the Caddys, all with the same flags.
func build(directory string) (programs map[string]string, err error) {
	programs = make(map[string]string)
	for name, pkg := range map[string]string{
		edgeLimit:  "github.com/edgelimit/caddy-edgelimit/xcaddy",
		noLimiter:  "github.com/edgelimit/caddy-edgelimit/bench/e2e/bare",
		perRequest: "github.com/edgelimit/caddy-edgelimit/bench/fleet/perrequest",
	} {
		programs[name] = filepath.Join(directory, name)
		command := exec.Command("go", "build", "-o", programs[name], pkg)
		if output, err := command.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("building %s: %w\n%s", name, err, output)
		}
	}
	return programs, nil
}
