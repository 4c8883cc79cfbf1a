package e2e

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The tests of a fleet run real servers: Redis alone, with TLS and an ACL user,
// behind Sentinels, and as a cluster of three nodes. Each has a directory and
// ports of its own, and ends with its test.

// redis is a server under test.
type redis struct {
	*process
	addr     string
	dir      string
	file     string // its configuration
	password string // of the default user; "": none
	tls      *tls.Config
}

// startRedis runs a server with these lines of configuration beside the
// necessary ones.
func startRedis(t *testing.T, lines ...string) *redis {
	t.Helper()
	r := newRedis(t, lines...)
	r.start(t)
	return r
}

// newRedis only prepares one: its address is known, nobody listens there.
func newRedis(t *testing.T, lines ...string) *redis {
	t.Helper()
	r := &redis{addr: freeAddr(t), dir: t.TempDir()}
	r.file = filepath.Join(r.dir, "redis.conf")
	for _, line := range lines {
		if password, ok := strings.CutPrefix(line, "requirepass "); ok {
			r.password = password
		}
	}
	write(t, r.file, strings.Join(append([]string{
		"port " + portOf(r.addr), "bind 127.0.0.1", "dir " + r.dir, "daemonize no", `save ""`, "appendonly no",
		"repl-diskless-sync-delay 0",
	}, lines...), "\n")+"\n")
	return r
}

// start runs it, for the first time or again.
func (r *redis) start(t *testing.T) {
	t.Helper()
	r.process = start(t, nil, tool(t, "redis-server"), r.file)
	r.await(t, func() bool {
		_, err := r.do("PING")
		return err == nil
	})
}

// kill ends it as a crash does.
func (r *redis) kill(t *testing.T) {
	t.Helper()
	if err := r.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-r.ended
}

// signal sends one to the process.
func (p *process) signal(t *testing.T, signal syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

// do runs a command over a connection of its own.
func (r *redis) do(args ...string) (any, error) {
	conn, err := r.dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.do(args...)
}

// must is do where an error fails the test.
func (r *redis) must(t *testing.T, args ...string) any {
	t.Helper()
	answer, err := r.do(args...)
	if err != nil {
		t.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	return answer
}

// text is must of a command that answers with text.
func (r *redis) text(t *testing.T, args ...string) string {
	t.Helper()
	return fmt.Sprint(r.must(t, args...))
}

// redisConn speaks as much of Redis's protocol as the tests need. It is not the
// client under test: a fault in that shall not hide itself.
type redisConn struct {
	net.Conn
	reader *bufio.Reader
}

func (r *redis) dial() (*redisConn, error) {
	plain, err := net.DialTimeout("tcp", r.addr, time.Second)
	if err != nil {
		return nil, err
	}
	if r.tls != nil {
		plain = tls.Client(plain, r.tls)
	}
	conn := &redisConn{plain, bufio.NewReader(plain)}
	if r.password != "" {
		if _, err := conn.do("AUTH", r.password); err != nil {
			conn.Close()
			return nil, err
		}
	}
	return conn, nil
}

func (c *redisConn) do(args ...string) (any, error) {
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return nil, err
	}
	var command bytes.Buffer
	fmt.Fprintf(&command, "*%d\r\n", len(args))
	for _, arg := range args {
		fmt.Fprintf(&command, "$%d\r\n%s\r\n", len(arg), arg)
	}
	if _, err := c.Write(command.Bytes()); err != nil {
		return nil, err
	}
	return c.read()
}

// read reads an answer: text, a number, a list of such, or nil.
func (c *redisConn) read() (any, error) {
	line, err := c.reader.ReadString('\n')
	if err != nil {
		return nil, err
	}
	line = strings.TrimRight(line, "\r\n")
	if line == "" {
		return nil, errors.New("an empty line for an answer")
	}
	kind, rest := line[0], line[1:]
	switch kind {
	case '+':
		return rest, nil
	case '-':
		return nil, errors.New(rest)
	}
	n, err := strconv.ParseInt(rest, 10, 64)
	switch {
	case err != nil:
		return nil, err
	case kind == ':':
		return n, nil
	case n < 0:
		return nil, nil
	case kind == '$':
		text := make([]byte, n+2)
		_, err := io.ReadFull(c.reader, text)
		return string(text[:n]), err
	}
	list := make([]any, 0, n)
	for range n {
		element, err := c.read()
		if err != nil {
			return nil, err
		}
		list = append(list, element)
	}
	return list, nil
}

// connections is how many of edge_limit's there are.
func (r *redis) connections(t *testing.T) int {
	t.Helper()
	return strings.Count(r.text(t, "CLIENT", "LIST"), "name=edge_limit ")
}

// scriptCalls is how many scripts the server has run.
func (r *redis) scriptCalls(t *testing.T) (calls int) {
	t.Helper()
	for line := range strings.Lines(r.text(t, "INFO", "commandstats")) {
		for _, command := range []string{"cmdstat_evalsha:calls=", "cmdstat_eval:calls="} {
			if rest, ok := strings.CutPrefix(line, command); ok {
				number, _, _ := strings.Cut(rest, ",")
				n, err := strconv.Atoi(number)
				if err != nil {
					t.Fatal(err)
				}
				calls += n
			}
		}
	}
	return calls
}

// startReplica runs a replica, and waits until it has all.
func startReplica(t *testing.T, master *redis, lines ...string) *redis {
	t.Helper()
	replica := startRedis(t, append([]string{"replicaof 127.0.0.1 " + portOf(master.addr)}, lines...)...)
	replica.await(t, func() bool {
		info, err := replica.do("INFO", "replication")
		return err == nil && strings.Contains(fmt.Sprint(info), "master_link_status:up")
	})
	return replica
}

const masterName = "fleet"

// sentinels are three that watch over a master and its replica.
type sentinels struct {
	watchers []*redis
	servers  []*redis // the first one began as the master
}

func startSentinels(t *testing.T) *sentinels {
	t.Helper()
	master := startRedis(t)
	s := &sentinels{servers: []*redis{master, startReplica(t, master)}}
	for range 3 {
		w := &redis{addr: freeAddr(t), dir: t.TempDir()}
		w.file = filepath.Join(w.dir, "sentinel.conf")
		write(t, w.file, fmt.Sprintf(`port %s
bind 127.0.0.1
dir %s
sentinel monitor %s 127.0.0.1 %s 2
sentinel down-after-milliseconds %[3]s 1000
sentinel failover-timeout %[3]s 3000
`, portOf(w.addr), w.dir, masterName, portOf(master.addr)))
		w.process = start(t, nil, tool(t, "redis-server"), w.file, "--sentinel")
		s.watchers = append(s.watchers, w)
	}
	for _, w := range s.watchers { // they find each other, and the replica, through the master
		w.await(t, func() bool {
			answer, err := w.do("SENTINEL", "MASTER", masterName)
			fields, _ := answer.([]any)
			return err == nil && field(fields, "num-other-sentinels") == "2" && field(fields, "num-slaves") == "1"
		})
	}
	return s
}

// field is a value in a list of names and values.
func field(fields []any, name string) string {
	for i := 0; i+1 < len(fields); i += 2 {
		if fields[i] == name {
			return fmt.Sprint(fields[i+1])
		}
	}
	return ""
}

// addresses are those of the Sentinels.
func (s *sentinels) addresses() (addrs []string) {
	for _, w := range s.watchers {
		addrs = append(addrs, w.addr)
	}
	return addrs
}

// awaitMaster waits until the Sentinels agree on another master than before.
func (s *sentinels) awaitMaster(t *testing.T, before string) {
	t.Helper()
	for _, w := range s.watchers {
		w.await(t, func() bool {
			answer, err := w.do("SENTINEL", "GET-MASTER-ADDR-BY-NAME", masterName)
			addr, _ := answer.([]any)
			return err == nil && len(addr) == 2 && addr[1] != portOf(before)
		})
	}
}

// cluster is one of three masters without replicas.
type cluster struct{ nodes []*redis }

func startCluster(t *testing.T) *cluster {
	t.Helper()
	const nodes, slots = 3, 16384
	c := new(cluster)
	buses := make([]string, nodes)
	for n := range nodes {
		buses[n] = portOf(freeAddr(t))
		c.nodes = append(c.nodes, startRedis(t, "cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-port "+buses[n],
			"cluster-node-timeout 1000", "cluster-require-full-coverage no"))
	}
	for n, node := range c.nodes {
		node.must(t, "CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(slots*n/nodes), strconv.Itoa(slots*(n+1)/nodes-1))
		if n > 0 {
			node.must(t, "CLUSTER", "MEET", "127.0.0.1", portOf(c.nodes[0].addr), buses[0])
		}
	}
	c.awaitWhole(t)
	return c
}

// awaitWhole waits until all nodes see all others.
func (c *cluster) awaitWhole(t *testing.T) {
	t.Helper()
	for _, node := range c.nodes {
		node.await(t, func() bool {
			info, err := node.do("CLUSTER", "INFO")
			text := fmt.Sprint(info)
			return err == nil && strings.Contains(text, "cluster_state:ok") && strings.Contains(text, "cluster_slots_ok:16384") &&
				strings.Contains(text, "cluster_known_nodes:3")
		})
	}
}

func (c *cluster) addresses() (addrs []string) {
	for _, node := range c.nodes {
		addrs = append(addrs, node.addr)
	}
	return addrs
}

// ofSlot are the node that has the slot of a key, and one that has not.
func (c *cluster) ofSlot(t *testing.T, key string) (has, hasNot *redis) {
	t.Helper()
	for _, node := range c.nodes {
		if _, err := node.do("GET", key); err != nil {
			hasNot = node
		} else {
			has = node
		}
	}
	if has == nil || hasNot == nil {
		t.Fatalf("nobody has the slot of %s, or everybody", key)
	}
	return has, hasNot
}

// scriptUser is an ACL user that may do no more than a store needs.
func scriptUser(name, password, prefix string) string {
	return "user " + name + " on >" + password + " resetkeys ~" + prefix + ":* -@all +@connection +info +eval +evalsha +del +time +get +set +pexpire " +
		"+zadd +zrem +zcard +zrangebyscore +zremrangebyscore +hgetall +hset +hdel"
}

// startTLSRedis runs a server that speaks TLS alone, to everybody who trusts
// the certificate in the file that it returns.
func startTLSRedis(t *testing.T, lines ...string) (r *redis, ca string) {
	t.Helper()
	cert, key := selfSigned(t)
	r = newRedis(t, append([]string{"tls-cert-file " + cert, "tls-key-file " + key, "tls-auth-clients no"}, lines...)...)
	r.addr = freeAddr(t)
	write(t, r.file, strings.Replace(readFile(t, r.file), "port ", "port 0\ntls-port "+portOf(r.addr)+"\n# was ", 1))
	r.tls = &tls.Config{InsecureSkipVerify: true} // that of the store under test is checked
	r.start(t)
	return r, cert
}

// The Caddys of a fleet.

const fleetPepper = "a secret of all the fleet's instances"

// storeOptions are global options with a store in Redis.
func storeOptions(options ...string) string {
	return fleetOptions("pepper \"" + fleetPepper + "\"\nstore redis {\n" + strings.Join(options, "\n") + "\n}")
}

// fleetOptions are global options where the connection is the client.
func fleetOptions(options string) string {
	return "edge_limit {\nclient connection\n" + options + "\n}"
}

// fleet are Caddys that run the same sites, each at an address of its own.
type fleet struct {
	caddys []*caddy
	addrs  []string
	next   int
}

// startFleet runs so many. sites gets the address to listen at.
func startFleet(t *testing.T, instances int, globals string, sites func(addr string) string) *fleet {
	t.Helper()
	f := new(fleet)
	for range instances {
		addr := freeAddr(t)
		f.caddys = append(f.caddys, startCaddy(t, globals, sites(addr)))
		f.addrs = append(f.addrs, addr)
	}
	return f
}

// load gives all of them new sites.
func (f *fleet) load(t *testing.T, globals string, sites func(addr string) string) {
	t.Helper()
	for i, c := range f.caddys {
		if status := c.load(t, c.caddyfile(globals, sites(f.addrs[i]))); status != http.StatusOK {
			t.Fatalf("a reload got %d", status)
		}
	}
}

// url is the path at the next instance: one after the other.
func (f *fleet) url(path string) string {
	f.next++
	return "http://" + f.addrs[f.next%len(f.addrs)] + path
}

// awaitState waits until all instances say that the store is in one of these
// states.
func (f *fleet) awaitState(t *testing.T, states ...string) {
	t.Helper()
	for _, c := range f.caddys {
		c.awaitState(t, states...)
	}
}

// sum is a metric, of all instances together.
func (f *fleet) sum(t *testing.T, series string) (sum float64) {
	t.Helper()
	for _, c := range f.caddys {
		sum += c.metric(t, series)
	}
	return sum
}

// storeState is what the admin API tells of a store.
type storeState struct {
	State     string
	Since     float64
	Error     string
	OnFailure string `json:"on_failure"`
	Instances int
	Instance  string
}

func (c *caddy) store(t *testing.T) (s storeState) {
	t.Helper()
	response, err := http.Get("http://" + c.admin + "/edge_limit/store")
	if err != nil {
		t.Fatal(err)
	}
	body := readAll(t, response)
	if err := json.Unmarshal(body, &s); err != nil || s.State == "" {
		t.Fatalf("the store's state: %d %s", response.StatusCode, body)
	}
	return s
}

// awaitState waits until the store is in one of these states, and returns what
// is told of it.
func (c *caddy) awaitState(t *testing.T, states ...string) (s storeState) {
	t.Helper()
	for begin := time.Now(); time.Since(begin) < patience; time.Sleep(10 * time.Millisecond) {
		if s = c.store(t); slices.Contains(states, s.State) {
			return s
		}
	}
	t.Fatalf("the store is %s (%s), want %s", s.State, s.Error, strings.Join(states, " or "))
	return s
}

// keyState is what the admin API tells of a key.
type keyState struct {
	Remaining  int64
	RetryAfter int64   `json:"retry_after"`
	BannedFor  float64 `json:"banned_for"`
	Forgiven   bool
}

// key looks a key up (POST), or forgives it (DELETE).
func (c *caddy) key(t *testing.T, method, limit, parts string) (k keyState) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+c.admin+"/edge_limit/limits/"+limit+"/keys", strings.NewReader(parts))
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	body := readAll(t, response)
	if err := json.Unmarshal(body, &k); err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s of a key of %s: %d %s", method, limit, response.StatusCode, body)
	}
	return k
}

// eventually polls until something is so, as something must be that is done in
// the background.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for begin := time.Now(); time.Since(begin) < patience; time.Sleep(10 * time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatal("in vain: " + what)
}

// visitors are clients with an address each, numbered from 0.
type visitors struct {
	mu  sync.Mutex
	all []*http.Transport
}

// visitorIP is the address of a visitor.
func visitorIP(n int) string { return fmt.Sprintf("127.0.1.%d", n+1) }

func (v *visitors) visitor(t *testing.T, n int) *http.Transport {
	v.mu.Lock()
	defer v.mu.Unlock()
	for len(v.all) <= n {
		v.all = append(v.all, clientFrom(t, visitorIP(len(v.all))))
	}
	return v.all[n]
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
