// Package redisstore keeps the budgets of edge_limit in Redis or Valkey, so that
// the same names and numbers hold for all instances together.
package redisstore

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

func init() {
	caddy.RegisterModule(Store{})
}

// Store keeps budgets in Redis or Valkey: in a single server, one that Sentinels
// watch over, or a cluster. Keys leave this process only as keyed hashes, and
// the server's clock counts.
//
// Caddy starts and reloads whether the server is there or not. While it cannot
// be asked, `on_failure` says what holds.
type Store struct {
	edgelimit.SharedOptions

	// Where the server is: `<host>:<port>`. Several are nodes of a cluster, or
	// Sentinels where a master is named.
	Address []string `json:"address,omitempty"`

	// The name that Sentinels know the master by. Default: none, there are no
	// Sentinels.
	MasterName string `json:"master_name,omitempty"`

	// The ACL user; `{env.NAME}` and `{file.PATH}` are expanded. Default: the
	// server's default user.
	Username string `json:"username,omitempty"`

	// Its password; `{env.NAME}` and `{file.PATH}` are expanded. Default: none.
	Password string `json:"password,omitempty"`

	// Whether to speak TLS. Default: no.
	TLS *TLS `json:"tls,omitempty"`

	// The number of the database; a cluster has only 0. Default: 0.
	Database int `json:"database,omitempty"`

	// What all keys begin with. Instances with another pepper need another one.
	// Default: `edge_limit`.
	Prefix string `json:"prefix,omitempty"`

	username string
	password string
	tls      *tls.Config
}

// TLS says how the server proves who it is.
type TLS struct {
	// A file with certificates of the authorities to trust, in PEM. Default: the
	// system's.
	CA string `json:"ca,omitempty"`
}

const (
	defaultPrefix = "edge_limit"
	maxDatabase   = 1<<31 - 1
	maxPrefix     = 100
)

// CaddyModule returns the Caddy module information.
func (Store) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "edge_limit.stores.redis",
		New: func() caddy.Module { return new(Store) },
	}
}

// Provision reads the secrets. It connects to nothing.
func (s *Store) Provision(caddy.Context) error {
	if err := s.validate(); err != nil {
		return err
	}
	var err error
	if s.Username != "" {
		if s.username, err = readSecret(s.Username); err != nil {
			return fmt.Errorf("username: %w", err)
		}
	}
	if s.Password != "" {
		if s.password, err = readSecret(s.Password); err != nil {
			return fmt.Errorf("password: %w", err)
		}
	}
	if s.TLS == nil {
		return nil
	}
	s.tls = &tls.Config{MinVersion: tls.VersionTLS12}
	if s.TLS.CA == "" {
		return nil
	}
	pem, err := os.ReadFile(s.TLS.CA)
	if err != nil {
		return fmt.Errorf("tls: %w", err)
	}
	s.tls.RootCAs = x509.NewCertPool()
	if !s.tls.RootCAs.AppendCertsFromPEM(pem) {
		return fmt.Errorf("tls: %s holds no certificate in PEM", s.TLS.CA)
	}
	return nil
}

// readSecret expands {env.*} and {file.*}, and refuses what is empty or not set.
func readSecret(text string) (string, error) {
	value, err := caddy.NewReplacer().ReplaceOrErr(text, true, true)
	if err != nil {
		return "", fmt.Errorf("a secret could not be read: %w", err)
	}
	if value = strings.TrimSpace(value); value == "" {
		return "", errors.New("a secret is empty: set the variable or the file that it names")
	}
	return value, nil
}

func (s *Store) validate() error {
	if len(s.Address) == 0 {
		return errors.New("an address is missing: write address <host>:<port>")
	}
	for _, address := range s.Address {
		if err := validateAddress(address); err != nil {
			return err
		}
	}
	if s.Database < 0 || s.Database > maxDatabase {
		return fmt.Errorf("database %d: must be 0 or more", s.Database)
	}
	if s.Database != 0 && s.cluster() {
		return fmt.Errorf("database %d: several addresses without a master_name are a cluster, which has only database 0", s.Database)
	}
	if s.Username != "" && s.Password == "" {
		return errors.New("username: a password is missing")
	}
	if len(s.Prefix) > maxPrefix || strings.ContainsAny(s.Prefix, "{}") || strings.ContainsFunc(s.Prefix, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return fmt.Errorf("prefix %q: must be at most %d visible ASCII characters without braces", s.Prefix, maxPrefix)
	}
	return s.SharedOptions.Validate()
}

func validateAddress(address string) error {
	if strings.ContainsAny(address, "{}") {
		return fmt.Errorf("address %q: write {$NAME}, which is replaced when the Caddyfile is read", address)
	}
	host, port, err := net.SplitHostPort(address)
	if n, portErr := strconv.Atoi(port); err != nil || host == "" || portErr != nil || n < 1 || n > 65535 {
		return fmt.Errorf("address %q: write <host>:<port>, for example 127.0.0.1:6379", address)
	}
	return nil
}

// cluster says whether the addresses are nodes of a cluster.
func (s *Store) cluster() bool { return len(s.Address) > 1 && s.MasterName == "" }

// Shared implements edgelimit.Store.
func (s *Store) Shared() *edgelimit.SharedStore {
	id, _ := json.Marshal(struct {
		*Store
		Username string
		Password string
	}{s, s.username, s.password})
	if s.TLS != nil && s.TLS.CA != "" { // read again if its content changes
		pem, _ := os.ReadFile(s.TLS.CA)
		id = append(id, pem...)
	}
	return &edgelimit.SharedStore{SharedOptions: s.SharedOptions, ID: string(id), Dial: s.dial}
}

const (
	connectTimeout  = time.Second
	answerTimeout   = 500 * time.Millisecond // after which a connection counts as dead
	flushDelay      = 20 * time.Microsecond  // between writes under load, so that one carries several calls
	bufferSize      = 32 << 10
	sentinelRefresh = 5 * time.Second // a missed message must not bind us to a demoted master
)

func (s *Store) dial(context.Context) (edgelimit.StoreConn, error) {
	option := rueidis.ClientOption{
		InitAddress: s.Address, Username: s.username, Password: s.password, SelectDB: s.Database, TLSConfig: s.tls,
		ClientName: "edge_limit", ClientSetInfo: rueidis.DisableClientSetInfo, // a right less that the user needs
		Dialer:    net.Dialer{Timeout: connectTimeout},
		DialCtxFn: s.dialGuarded,

		ConnWriteTimeout:    answerTimeout,
		MaxFlushDelay:       flushDelay,
		ReadBufferEachConn:  bufferSize,
		WriteBufferEachConn: bufferSize,

		DisableCache:     true, // old servers and proxies refuse to track what we would cache
		DisableRetry:     true, // what has perhaps been charged is not charged again
		AlwaysPipelining: true, // else a call that ends by its deadline closes the connection

		ForceSingleClient: !s.cluster() && s.MasterName == "",
	}
	client, err := s.newClient(option)
	if err != nil {
		return nil, s.explain(err)
	}
	return newConn(client, s), nil
}

var errHandshake = errors.New("TLS handshake")

// dialGuarded connects to a server that is not believed everything. Sentinels tell
// what they were not asked for.
func (s *Store) dialGuarded(ctx context.Context, address string, dialer *net.Dialer, config *tls.Config) (net.Conn, error) {
	conn, err := dialServer(ctx, address, dialer, config)
	if err != nil {
		return nil, err
	}
	return &guardedConn{Conn: conn, counts: s.MasterName == ""}, nil
}

// dialServer connects, and tells which part of that failed.
func dialServer(ctx context.Context, address string, dialer *net.Dialer, config *tls.Config) (net.Conn, error) {
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil || config == nil {
		return conn, err
	}
	config = config.Clone()
	config.ServerName, _, _ = net.SplitHostPort(address)
	secure := tls.Client(conn, config)
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if err := secure.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("%w: %w", errHandshake, err)
	}
	return secure, nil
}

// explain classifies why a connection could not be made. If only one side speaks
// TLS, either may wait for the other or hang up, which looks like a bad network.
func (s *Store) explain(err error) error {
	explained := classify(err, s.cluster())
	var storeErr *edgelimit.StoreError
	if !errors.As(explained, &storeErr) {
		return explained
	}
	unclear := storeErr.Kind == edgelimit.StoreTimeout || storeErr.Kind == edgelimit.StoreNetwork || storeErr.Kind == edgelimit.StoreNotRedis
	if errors.Is(err, errHandshake) || unclear && s.tls == nil && slices.ContainsFunc(s.Address, speaksTLS) {
		return &edgelimit.StoreError{Kind: edgelimit.StoreTLS, Advice: advice[edgelimit.StoreTLS], Err: err}
	}
	return explained
}

// speaksTLS says whether a server does. Nothing is sent to it but the beginning
// of a handshake, and its certificate does not matter.
func speaksTLS(address string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), connectTimeout)
	defer cancel()
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return errors.As(err, new(tls.AlertError))
	}
	conn.Close()
	return true
}

// newClient connects. Sentinels often have no password of their own, or the
// server's.
func (s *Store) newClient(option rueidis.ClientOption) (rueidis.Client, error) {
	if s.MasterName == "" {
		return rueidis.NewClient(option)
	}
	option.Sentinel = rueidis.SentinelOption{
		MasterSet: s.MasterName, TopologyRefreshInterval: sentinelRefresh, Dialer: option.Dialer, TLSConfig: s.tls,
	}
	client, err := rueidis.NewClient(option)
	if err == nil || s.password == "" || kindOf(err, false) != edgelimit.StoreAuth {
		return client, err
	}
	option.Sentinel.Username, option.Sentinel.Password = s.username, s.password
	client, again := rueidis.NewClient(option)
	if again != nil && strings.HasPrefix(err.Error(), "NOPERM") {
		return nil, err // it is the master that refuses, and Sentinels have nothing to do with it
	}
	return client, again
}

// UnmarshalCaddyfile parses the block. Syntax:
//
//	store redis {
//		address     <host:port...>
//		master_name <name>
//		username    <name>
//		password    <secret>
//		tls         [<ca file>]
//		database    <n>
//		prefix      <text>
//		timeout     <duration>
//		on_failure  local|local_full|open|closed
//		fleet       <n>
//	}
func (s *Store) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if d.NextArg() {
		return d.Errf("unexpected argument %q: write store redis { ... }", d.Val())
	}
	opening := *d
	seen := make(map[string]bool)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		option := d.Val()
		if seen[option] {
			return d.Errf("%s is set twice: the second would replace the first", option)
		}
		seen[option] = true
		if known, err := s.SharedOptions.UnmarshalOption(d); known {
			if err != nil {
				return err
			}
			continue
		}
		if err := s.unmarshalOption(d); err != nil {
			return err
		}
	}
	if err := s.validate(); err != nil {
		return opening.WrapErr(err)
	}
	return nil
}

func (s *Store) unmarshalOption(d *caddyfile.Dispenser) error {
	option := d.Val()
	one := func(what string, target *string) error {
		if !d.NextArg() {
			return d.Errf("%s: an argument is missing: write %s", option, what)
		}
		*target = d.Val()
		if *target == "" {
			return d.Errf("%s is empty: write %s", option, what)
		}
		if d.NextArg() {
			return d.Errf("unexpected argument %q", d.Val())
		}
		return nil
	}
	switch option {
	case "address":
		if s.Address = d.RemainingArgs(); len(s.Address) == 0 {
			return d.Err("address: an argument is missing: write <host>:<port>")
		}
		for _, address := range s.Address {
			if err := validateAddress(address); err != nil {
				return d.WrapErr(err)
			}
		}
		return nil
	case "master_name":
		return one("the name that the Sentinels know the master by", &s.MasterName)
	case "username":
		return one("the name of an ACL user", &s.Username)
	case "password":
		return one("{env.NAME} or {file.PATH}", &s.Password)
	case "prefix":
		return one("what keys begin with", &s.Prefix)
	case "tls":
		s.TLS = new(TLS)
		if d.NextArg() {
			s.TLS.CA = d.Val()
		}
		if d.NextArg() {
			return d.Errf("unexpected argument %q", d.Val())
		}
		return nil
	case "database":
		var text string
		if err := one("a whole number of 0 or more", &text); err != nil {
			return err
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n > maxDatabase {
			return d.Errf("database %q: must be a whole number of 0 or more", text)
		}
		s.Database = n
		return nil
	}
	return d.Errf("unrecognized subdirective %q; possible here: address, master_name, username, password, tls, database, "+
		"prefix, timeout, on_failure, fleet", option)
}

// Interface guards.
var (
	_ edgelimit.Store       = (*Store)(nil)
	_ caddy.Provisioner     = (*Store)(nil)
	_ caddyfile.Unmarshaler = (*Store)(nil)
)
