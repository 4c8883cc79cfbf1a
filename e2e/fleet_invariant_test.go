package e2e

import (
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// episode is a fault, and how long its effects may last.
type episode struct {
	what       string
	begin, end time.Time
	store      bool // budgets may be spent anew: state was lost, or instances fell back on their shares
	instance   int  // that hangs up on requests; -1: none
}

// faultsDuration is for how long faults are made, 60 s or what EDGE_LIMIT_FAULTS
// says: 10m for example.
func faultsDuration(t *testing.T) time.Duration {
	t.Helper()
	if testing.Short() {
		return 10 * time.Second
	}
	duration, err := time.ParseDuration(cmp.Or(os.Getenv("EDGE_LIMIT_FAULTS"), "60s"))
	if err != nil {
		t.Fatalf("EDGE_LIMIT_FAULTS: %v", err)
	}
	return duration
}

// faultsSeed is random, or what EDGE_LIMIT_SEED says: the faults of a run that
// failed come again, though not to the microsecond.
func faultsSeed(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("EDGE_LIMIT_SEED")
	if text == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("EDGE_LIMIT_SEED: %v", err)
	}
	return seed
}

// after is for how long an episode can have effects: until the store is in use
// again.
const after = 3 * time.Second

// watchSlowness finds out when instances got no answer in time without a fault of
// ours, as on a machine that is busy: they fall back on their shares then too.
func (f *fleet) watchSlowness(stop <-chan struct{}) <-chan []episode {
	found := make(chan []episode, 1)
	go func() {
		var slow []episode
		known := make([]string, len(f.caddys))
		begin := time.Now()
		for {
			select {
			case <-stop:
				found <- slow
				return
			case <-time.After(200 * time.Millisecond):
			}
			now, more := time.Now(), false
			for i := range f.caddys {
				errors := f.storeErrorsOf(i)
				more = more || errors != "" && errors != known[i]
				known[i] = errors
			}
			if more {
				slow = append(slow, episode{"an answer is late", begin, now, true, -1})
			}
			begin = now
		}
	}()
	return found
}

// storeErrorsOf are the errors that an instance has counted, "" if there are none
// or it does not answer.
func (f *fleet) storeErrorsOf(instance int) (errors string) {
	response, err := http.Get("http://" + f.caddys[instance].admin + "/metrics")
	if err != nil {
		return ""
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "caddy_edge_limit_store_errors_total") && !strings.HasSuffix(line, " 0\n") {
			errors += line
		}
	}
	return errors
}

// Whatever happens to the store and to the instances, no client gets more than
//
//	burst * (1 + losses of state and falls back on shares) + rate * T
//
// in any time T, and all together no more than the ceiling's count times the
// same. Where nothing happened it is the ceiling's count in each window. No
// request gets a 5xx, and none waits for the store longer than it may.
func TestFleetInvariant(t *testing.T) {
	needLoopbackNetwork(t)
	const (
		instances, clients = 3, 6
		burst, rate        = 5, 20
		count              = 100 // of the ceiling, in a second
		limited            = http.StatusTooManyRequests
		full               = http.StatusTeapot // else the ceiling's 503 could be taken for a failure
	)
	duration, seed := faultsDuration(t), faultsSeed(t)
	t.Logf("EDGE_LIMIT_SEED=%d EDGE_LIMIT_FAULTS=%v", seed, duration)
	random := rand.New(rand.NewPCG(seed, 0))

	r := startRedis(t)
	globals := storeOptions("address "+r.addr, fmt.Sprintf("fleet %d", instances))
	sites := func(n int) func(addr string) string {
		return func(addr string) string {
			return site(addr, fmt.Sprintf(`
				header X-Generation %d
				route /limited {
					edge_limit {
						limit per_client %d/s {
							burst %d
						}
						ceiling all %d/s {
							status %d
						}
					}
					header X-Admitted {time.now.unix_ms}
					respond ok
				}
				respond plain`, n, rate, burst, count, full))
		}
	}
	f := startFleet(t, instances, globals, sites(0))
	f.awaitState(t, "connected")
	stop := make(chan struct{})
	var loads, controls [clients]load
	for n := range clients {
		url := func(path string) func(int) string {
			return func(request int) string { return "http://" + f.addrs[(n+request)%instances] + path }
		}
		client, control := clientFrom(t, visitorIP(n)), clientFrom(t, visitorIP(n))
		loads[n].run(client, 25*time.Millisecond, stop, url("/limited"))
		controls[n].run(control, 100*time.Millisecond, stop, url("/plain"))
	}

	slow := f.watchSlowness(stop)
	var episodes []episode
	happen := func(what string, store bool, instance int, do func()) {
		e := episode{what: what, begin: time.Now(), store: store, instance: instance}
		do()
		e.end = time.Now()
		episodes = append(episodes, e)
	}
	pause := func(most int) { time.Sleep(time.Duration(20+random.IntN(most)) * time.Millisecond) }
	begin, generation := time.Now(), 0
	for time.Since(begin) < duration {
		victim := random.IntN(instances)
		switch random.IntN(9) {
		case 0:
			happen("the server hangs", true, -1, func() {
				r.signal(t, syscall.SIGSTOP)
				pause(1500)
				r.signal(t, syscall.SIGCONT)
			})
		case 1:
			happen("the server dies", true, -1, func() {
				r.kill(t)
				pause(1500)
				r.start(t)
			})
		case 2:
			happen("the server is paused", true, -1, func() {
				r.must(t, "CLIENT", "PAUSE", "400", "ALL")
				pause(400)
				r.must(t, "PING")
			})
		case 3:
			happen("scripts are forgotten", false, -1, func() { r.must(t, "SCRIPT", "FLUSH") })
		case 4:
			happen("everything is forgotten", true, -1, func() { r.must(t, "FLUSHALL") })
		case 5:
			happen("connections are cut", true, -1, func() { r.must(t, "CLIENT", "KILL", "TYPE", "normal") })
		case 6:
			happen("memory is full", true, -1, func() {
				r.must(t, "CONFIG", "SET", "maxmemory", "1")
				pause(1000)
				r.must(t, "CONFIG", "SET", "maxmemory", "0")
			})
		case 7:
			happen("an instance dies", true, victim, func() {
				if err := f.caddys[victim].cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				<-f.caddys[victim].ended
				pause(500)
				f.caddys[victim].start(t)
			})
		case 8:
			generation++
			happen("an instance reloads", false, victim, func() {
				c := f.caddys[victim]
				if status := c.load(t, c.caddyfile(globals, sites(generation)(f.addrs[victim]))); status != ok {
					t.Errorf("a reload got %d", status)
				}
			})
		}
		pause(2000)
		if len(episodes)%8 == 0 { // else some seeds leave no time in which nothing happens
			time.Sleep(after + 1500*time.Millisecond)
		}
	}
	f.awaitState(t, "connected")
	time.Sleep(2 * time.Second)
	close(stop)
	slowAlone := 0
	for _, e := range <-slow { // whatever a fault explains is not counted again
		if !slices.ContainsFunc(episodes, func(fault episode) bool {
			return fault.store && fault.begin.Before(e.end) && fault.end.Add(after).After(e.begin)
		}) {
			episodes = append(episodes, e)
			slowAlone++
		}
	}

	during := func(from, to time.Time) (spentAnew int, hungUp func(instance int) bool) {
		var dead []int
		for _, e := range episodes {
			if e.begin.Before(to) && e.end.Add(after).After(from) {
				if e.store {
					spentAnew++
				}
				dead = append(dead, e.instance)
			}
		}
		return spentAnew, func(instance int) bool { return slices.Contains(dead, instance) }
	}
	var all []visit
	late, lateControls, lost, total, totalControls := 0, 0, 0, 0, 0
	for n := range clients {
		visits := loads[n].wait()
		var passed []visit
		for _, v := range visits {
			_, hungUp := during(v.sent, v.done)
			switch {
			case v.err != nil && (hungUp(0) || hungUp(1) || hungUp(2)):
				lost++
			case v.err != nil:
				t.Errorf("client %d: %v", n, v.err)
			case v.status == ok:
				passed = append(passed, v)
			case v.status != limited && v.status != full:
				t.Errorf("client %d: status %d", n, v.status)
			}
			if v.err == nil && v.done.Sub(v.sent) > storeTimeout+50*time.Millisecond {
				late++
			}
		}
		total += len(visits)
		for _, v := range controls[n].wait() {
			if v.err == nil && v.done.Sub(v.sent) > storeTimeout+50*time.Millisecond {
				lateControls++
			}
			totalControls++
		}
		for i, first := range passed {
			for j := i; j < len(passed); j += 1 + (j-i)/8 { // windows of all lengths, the short ones closely
				last := passed[j].done
				for _, v := range passed[i:j] {
					if v.done.After(last) {
						last = v.done
					}
				}
				anew, _ := during(first.sent, last)
				if bound := burst*float64(1+anew) + rate*last.Sub(first.sent).Seconds(); float64(j-i+1) > bound {
					t.Fatalf("client %d: %d admitted within %v, %v after the begin: with %d episodes at most %.1f may be",
						n, j-i+1, last.Sub(first.sent), first.sent.Sub(begin), anew, bound)
				}
			}
		}
		all = append(all, passed...)
	}
	slices.SortFunc(all, func(a, b visit) int { return a.sent.Compare(b.sent) })
	worst := [2]int{}
	for i, first := range all {
		end := first.sent.Add(time.Second)
		n := 0
		for _, v := range all[i:] {
			if v.sent.After(end) {
				break
			}
			if (v.stamp + 1) < end.UnixMilli() {
				n++
			}
		}
		anew, _ := during(first.sent, end)
		worst[min(anew, 1)] = max(worst[min(anew, 1)], n)
		if n > count*(1+anew) {
			t.Fatalf("the ceiling: %d admitted in the second from %v on: with %d episodes at most %d may be", n, first.sent.Sub(begin), anew, count*(1+anew))
		}
	}
	kinds := make(map[string]int)
	for _, e := range episodes {
		kinds[e.what]++
	}
	t.Logf("%d requests, %d admitted, %d lost with their instance, %d times an answer was late by itself; worst second of the ceiling of %d: %d where nothing happened, %d else; %d late, of %d control requests %d; %v",
		total, len(all), lost, slowAlone, count, worst[0], worst[1], late, totalControls, lateControls, kinds)
	if float64(late)/float64(total) > float64(lateControls)/float64(totalControls)+0.01 {
		t.Errorf("%d of %d requests were late, of %d control requests %d", late, total, totalControls, lateControls)
	}
	if worst[0] < count/2 || len(episodes) < int(duration.Seconds())/4 {
		t.Errorf("%d episodes, and at most %d admitted in a second of quiet: too little to mean something", len(episodes), worst[0])
	}
}
